"""`mppo train` that is answered by a real SGLang server, to its end and to other ends."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mppo.cli.main import main
from tests.distributed.ranks import run_on_ranks
from tests.distributed.train_runs import train, train_killed
from tests.sglang.cases import SMALL

pytestmark = pytest.mark.sglang

TWO_RANKS = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=1")
MODEL = Path("models/SmolLM2-135M-Instruct")
"""What launch/test.sh makes, as the quick start does."""


def servers_of(out_dir: Path) -> list[str]:
    """Process ids of what a run has launched."""
    return subprocess.run(["pgrep", "-f", str(out_dir)], capture_output=True, text=True).stdout.split()


def gone(out_dir: Path, within_s: float = 20) -> bool:
    until = time.monotonic() + within_s
    while servers_of(out_dir) and time.monotonic() < until:
        time.sleep(0.2)
    return not servers_of(out_dir)


def test_a_killed_run_leaves_no_server_and_goes_on(sglang_environment, tmp_path):
    """Log-probs of the server are those of the trainer, under the weights of each step, before and after."""
    run_of = (*SMALL, *TWO_RANKS, f"rollout.sglang.environment={sglang_environment}", "trainer.save_freq=1")
    train_killed("class", 2, tmp_path, *run_of, "trainer.total_training_steps=50")
    assert (tmp_path / "sglang" / "server_0.log").stat().st_size, "there was a server"
    assert gone(tmp_path)
    run = train("class", 2, tmp_path, *run_of, "trainer.total_training_steps=3", "trainer.resume_changed=true")
    distances = run.column("rollout_corr/log_prob_distance")
    assert len(distances) == 3 and max(distances) < 1e-4
    assert run.column("rollout/staleness/max") == [0.0, 0.0, 0.0]
    assert gone(tmp_path)


def test_without_any_server_training_stops_with_its_state_saved(sglang_environment, tmp_path):
    long = ("data.max_response_length=400", "rollout.timeout_s=60", "rollout.sglang.start_timeout_s=60")
    run_of = (*SMALL, *TWO_RANKS, *long, f"rollout.sglang.environment={sglang_environment}")
    arguments = ["train", "--config-name", "class", f"trainer.out_dir={tmp_path}", *run_of]
    ended = run_on_ranks(train_while_servers_are_killed, 2, arguments, tmp_path, timeout=200)
    assert set(ended.exit_codes) == {2}, ended.tails
    assert "EngineError" in ended.output and "http://127.0.0.1" in ended.output
    assert (tmp_path / "checkpoints" / "latest").is_file()


def train_while_servers_are_killed(arguments: list[str], out_dir: Path) -> None:
    """The `mppo` command; once a step is done its server is killed, as often as it comes back."""

    def kill() -> None:
        while not (out_dir / "metrics.jsonl").is_file() or not (out_dir / "metrics.jsonl").read_text():
            time.sleep(0.05)
        while True:
            time.sleep(0.5)
            subprocess.run(["pkill", "-9", "-f", f"launch_server.*{out_dir}"], check=False)

    threading.Thread(target=kill, daemon=True).start()
    sys.exit(main(arguments))


def test_the_task_of_the_quick_start_is_learned(sglang_environment, tmp_path):
    assert MODEL.is_dir(), "launch/test.sh makes it; or run launch/quickstart.sh once"
    shortened = ("trainer.total_training_steps=10", "trainer.test_freq=0", "trainer.save_hf=false")
    run = train(
        "quickstart", 2, tmp_path, "rollout=sglang", f"rollout.sglang.environment={sglang_environment}", *shortened
    )
    before, after = run.column("val/accuracy")
    assert before < 0.5 and after >= 0.9
