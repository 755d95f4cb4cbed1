"""What SGLang's own loaders build from a model folder, against what the table of its layout says, bit for bit.

Needs an environment with SGLang 0.5.23, named by MPPO_SGLANG_ENV (a folder with `venv/bin/python` and, on a machine
without a GPU, stand-ins for CUDA packages in `stubs/`).
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from mppo.weights.architectures import architecture_of
from mppo.weights.pretrained import read_hf_config
from mppo.weights.sglang_layout import Worker, sglang_layout
from mppo.weights.transfer_plan import plan, whole_tensors
from tests.distributed.model_folders import COMMON, write_model

ENVIRONMENT = os.environ.get("MPPO_SGLANG_ENV")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not ENVIRONMENT, reason="MPPO_SGLANG_ENV names no environment with SGLang"),
]

DENSE = ["llama", "llama-tied", "llama-mha", "qwen2", "qwen2-tied", "qwen3"]
CASES = {
    "tp1": (1, 1, [*DENSE, "qwen3-moe"]),
    "tp2": (2, 1, [*DENSE, "qwen3-moe"]),
    "tp3": (3, 1, ["llama-six-heads"]),
    "tp4": (4, 1, [*DENSE, "qwen3-moe"]),
    "tp2-ep2": (2, 2, ["qwen3-moe"]),
    "tp4-ep2": (4, 2, ["qwen3-moe"]),
}
"""Workers, expert-parallel workers, models. Of four workers two share a key/value head; three do not divide the padded
vocabulary."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in [*DENSE, "qwen3-moe"]:
        write_model(name, folder / name)
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    AutoModelForCausalLM.from_config(LlamaConfig(**COMMON | sizes)).save_pretrained(folder / "llama-six-heads")
    return folder


def load_in_sglang(out: Path, tp: int, ep: int, folders: list[Path]) -> None:
    environment = Path(ENVIRONMENT)
    script = Path(__file__).parent / "load_workers.py"
    variables = {"PYTHONPATH": str(environment / "stubs"), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [environment / "venv/bin/python", script, out, str(tp), str(ep), *folders],
        env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.mark.parametrize("case", CASES)
def test_workers_hold_what_the_table_says(models, tmp_path, case):
    tp, ep, names = CASES[case]
    load_in_sglang(tmp_path, tp, ep, [models / name for name in names])
    for name in names:
        hf = read_hf_config(str(models / name), "model.path")
        architecture = architecture_of(hf)
        layout = sglang_layout(architecture, architecture.model_config(hf), tp, torch.float32, ep=ep)
        tensors = load_file(models / name / "model.safetensors")
        sends = plan(whole_tensors(layout.tensors, {0: list(layout.tensors)}), layout).sends
        for rank in range(tp):
            worker, found = Worker(0, rank), torch.load(tmp_path / f"{name}-{rank}.pt")
            holding = layout.holdings[worker]
            built = {n: torch.full(shape, torch.nan) for n, shape in holding.shapes.items()}
            for send in sends:
                if send.target == worker:
                    send.write.view(built).copy_(send.read.view(tensors))
            for region in holding.padding:
                region.view(built).zero_()
            assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in built.items()}
            differing = [n for n in built if not torch.equal(built[n], found[n])]
            assert differing == [], f"{name}, worker {rank} of {tp}"
