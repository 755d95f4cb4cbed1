"""Hugging Face folder -> Megatron chunks on four processes -> Hugging Face folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from tests.distributed.model_folders import CONFIGS, EXPERT_MODELS, REWARD_MODELS, write_all, write_model
from tests.distributed.ranks import call_on_ranks
from tests.distributed.weights_worker import round_trips

pytestmark = pytest.mark.distributed

LAYOUTS = ("tp2-pp2-sp", "tp2-pp2-vpp2-sp")
EXPERT_LAYOUTS = ("tp2-pp2-ep2-sp", "pp2-vpp2-ep2-dp2", "cp2-ep4-dp2")
ROUND_TRIPS = [
    *((layout, name) for layout in LAYOUTS for name in [*CONFIGS, "llama-bfloat16"]),
    *((layout, name) for layout in EXPERT_LAYOUTS for name in EXPERT_MODELS),
]
PROCESSES = 4
LAYER, HEAD = "model.layers.3.", "score.weight"
BROKEN = {
    "broken-missing": LAYER + "mlp.up_proj.weight",
    "broken-shape": LAYER + "self_attn.o_proj.weight",
    "broken-config": ".mlp.",
    "broken-reward": HEAD,
}
"""Folders with something wrong, and (part of) the name of the tensor; the last stage holds it."""


def write_broken(folder):
    for name in BROKEN:
        write_model("reward" if name == "broken-reward" else "llama", folder / name)
    change_tensors(folder / "broken-missing", lambda tensors: tensors.pop(BROKEN["broken-missing"]))
    change_tensors(
        folder / "broken-shape", lambda tensors: tensors.update({BROKEN["broken-shape"]: torch.ones(32, 64)})
    )
    change_tensors(folder / "broken-reward", lambda tensors: tensors.update({HEAD: torch.ones(2, 64)}))
    config = folder / "broken-config" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 48}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = write_all(tmp_path_factory.mktemp("models"))
    write_model("llama", folder / "llama-bfloat16", torch.bfloat16)
    write_broken(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(models, saved):
    return call_on_ranks(round_trips, PROCESSES, models, saved)[0]


@pytest.mark.parametrize(("layout", "name"), ROUND_TRIPS)
def test_export_gives_back_every_tensor_bit_for_bit(found, layout, name):
    assert found[f"{layout}/{name}"] == [[]] * PROCESSES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "reward"])
def test_a_critic_starts_from_the_backbone_and_a_zero_head(found, layout, name):
    assert found[f"{layout}/{name}/critic"] == [[]] * PROCESSES


@pytest.mark.parametrize("files", ["", "several-files"])
@pytest.mark.parametrize(("layout", "name"), ROUND_TRIPS)
def test_a_saved_folder_is_the_same_model_to_transformers(found, models, saved, layout, name, files):
    auto = AutoModelForSequenceClassification if name in REWARD_MODELS else AutoModelForCausalLM
    original = auto.from_pretrained(models / name)
    folder = saved / layout / files / name
    again, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.dtype == original.dtype
    assert again.state_dict().keys() == original.state_dict().keys()
    for key, tensor in original.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    tokens = torch.arange(10)[None]
    # files are mapped into memory, and a tensor aligned otherwise may be added up in another order
    torch.testing.assert_close(again(tokens).logits, original(tokens).logits)
    generation = [GenerationConfig.from_pretrained(f) for f in (models / name, folder) if name not in REWARD_MODELS]
    assert generation[:1] == generation[1:]


@pytest.mark.parametrize(("layout", "name"), ROUND_TRIPS)
def test_a_small_model_is_one_file_and_a_large_one_several_of_bounded_size(found, saved, layout, name):
    assert [file.name for file in (saved / layout / name).glob("*.safetensors")] == ["model.safetensors"]
    folder = saved / layout / "several-files" / name
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > PROCESSES
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 60_000 or len(tensors) == 1
        assert {index["weight_map"][tensor] for tensor in tensors} == {file.name}
        total += size
    assert index["metadata"]["total_size"] == total


def test_nothing_half_written_is_left(found, saved):
    assert [path for path in saved.rglob("*") if path.suffix in (".incomplete", ".replaced")] == []


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, name) for layout in LAYOUTS for name in ("llama-tied", "qwen2")),
        *((layout, "qwen3-moe") for layout in EXPERT_LAYOUTS),
    ],
)
def test_a_local_engine_gets_the_model_point_to_point(found, layout, name):
    """The one all-reduce is of a number: whether all ranks are ready."""
    for engine in found[f"{layout}/{name}/engine"]:
        assert engine["differing"] == [] and engine["plans"] == []
        assert engine["collectives"] == []
        assert engine["messages"] == ["gloo:recv", "gloo:send"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_told_of_a_target_that_does_not_fit(found, layout):
    assert all("rank 0: model.norm.weight is [3]" in message for message in found[f"{layout}/target"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_told_that_a_model_cannot_be_written(found, layout):
    assert all("a-file/hf.incomplete: the model cannot be written" in m for m in found[f"{layout}/unwritable"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_folder_has_its_tokenizer(found, models, saved, layout):
    again = AutoTokenizer.from_pretrained(saved / layout / "llama")
    original = AutoTokenizer.from_pretrained(models / "llama")
    assert again("12+3=").input_ids == original("12+3=").input_ids
    assert again.decode(again("12+3=").input_ids) == "12+3="


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BROKEN)
def test_every_rank_names_a_bad_tensor(found, layout, name):
    assert all(BROKEN[name] in message for message in found[f"{layout}/{name}"])
