"""`mppo mismatch` against a real SGLang server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mppo.cli.main import main
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.sglang

REPOSITORY = Path(__file__).parents[2]


def test_every_injected_cause_is_named_and_clean_runs_are_silent(sglang_environment, tmp_path):
    """`python -m tests.mismatch` has a hundred clean runs; here they are fewer."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.mismatch", "--clean", "20", "--json", tmp_path / "found.json"],
        cwd=REPOSITORY,
        env=os.environ | {"MPPO_SGLANG_ENV": str(sglang_environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["injected"], found["named"], found["false_alarms"]) == (14, 14, 0), result.stdout
    assert [name for name, case in found["cases"].items() if not case["named"]] == []
    assert found["largest_clean_difference"] < 1e-4


def test_the_command_on_two_ranks(sglang_environment, tmp_path):
    """Tensor-parallel ranks against a server that was told another epsilon."""
    overrides = '{\\"rms_norm_eps\\": 0.01}'
    arguments = [
        "mismatch",
        "class",
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=1",
        "rollout.engine=sglang",
        f"rollout.sglang.environment={sglang_environment}",
        f'rollout.sglang.server_options=["--json-model-override-args","{overrides}"]',
        f"trainer.out_dir={tmp_path}",
        "--json",
        str(tmp_path / "found.json"),
    ]
    ended = run_on_ranks(_command, 2, arguments, timeout=300)
    assert set(ended.exit_codes) == {1}, ended.tails
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert finding["cause"] == "norm epsilon" and finding["detail"] == 0.01
    assert "what to do" in ended.output and "rms_norm_eps" in ended.output
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert left == "", "servers are gone with the command"


def _command(arguments: list[str]) -> None:
    """Exit code included."""
    sys.exit(main(arguments))
