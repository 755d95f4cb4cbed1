"""Roles that are saved under one layout and loaded under others; run folders that survive what happens to a run."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.checkpoint_cases import CASES
from tests.distributed.checkpoints_worker import save_and_reload
from tests.distributed.launch import environment
from tests.distributed.ranks import call_on_ranks
from tests.distributed.run_folder_worker import after as after_the_kill

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    return call_on_ranks(save_and_reload, 4, folder, timeout=900)[0]


@pytest.mark.parametrize("name", [case.name(target) for case in CASES for target in case.targets])
def test_a_role_goes_on_as_if_it_had_not_been_saved(reloaded, name):
    """Under another layout, with the other optimizer, before the first update or after it."""
    assert reloaded[name]["unequal"] == []
    assert reloaded[name]["norm"] < 1e-6
    assert reloaded[name]["next"] < (1e-6 if "float32" in name else 1e-3)  # of bf16, the last digit of a weight


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed by the kill of its launcher, while it saved: its folder, and what it knew before."""
    folder = tmp_path_factory.mktemp("run")
    before = folder / "before.json"
    mark = f"MPPO_TEST_RUN={folder}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    process = subprocess.Popen(
        [*launcher, str(Path(__file__).parent / "run_folder_worker.py"), str(before), str(folder)],
        env=environment() | dict([mark.split("=")]),
    )
    try:
        wait_for(lambda: len(list(folder.glob("waiting-*"))) == 3, 120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not processes_with(mark), 15)
    return folder, json.loads(before.read_text())


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.1)


def processes_with(mark: str) -> list[str]:
    """Living processes that have this in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def after(killed):
    folder, _ = killed
    return call_on_ranks(after_the_kill, 2, folder)[0]


def test_a_kill_in_the_midst_of_a_save_leaves_the_checkpoint_before_it(killed, after):
    _, before = killed
    assert after["before"] == {"folders": ["step_000001", "step_000002"], "latest": "step_000001"}
    assert after["resumed"]["step"] == 1
    assert after["resumed"]["weight"] == before["weight"]
    assert after["resumed"]["counter"] == {"count": 1, "third": 1 / 3}
    assert after["resumed"]["lines"][0].endswith("checkpoints/step_000001: 1 steps, weight version 1")


def test_what_each_rank_had_is_dealt_out_to_fewer_ranks(after):
    assert after["resumed"]["groups"] == [["rank 0", "rank 2"], ["rank 1"]]


def test_a_save_that_fails_on_one_rank_is_said_on_all_and_leaves_the_checkpoint_before_it(after):
    assert after["full disk"]["error"] == "CheckpointError"
    assert "No space left on device" in after["full disk"]["said"]
    assert after["full disk"]["latest"] == "step_000001"
    assert after["full disk"]["folders"] == ["step_000001", "step_000003"]


def test_a_save_that_raises_leaves_the_checkpoint_before_it(after):
    assert (after["broken"]["error"], after["broken"]["latest"]) == ("RankError", "step_000001")
    assert "ZeroDivisionError" in after["broken"]["said"]


def test_another_configuration_is_refused_by_name_and_taken_when_asked_for(after):
    assert after["changed"]["error"] == "ConfigError"
    assert "actor.optim.lr: 1e-06 -> 0.5" in after["changed"]["said"]
    assert "trainer.resume_changed=true" in after["changed"]["said"]
    assert "trainer.save_freq" not in after["changed"]["said"]
    assert after["allowed"][1:] == [
        "  actor.optim.lr: 1e-06 -> 0.5  (trains otherwise; trainer.resume_changed=true)",
        "  trainer.save_freq: 0 -> 7",
    ]


def test_another_model_is_refused_even_when_changes_are_allowed(after):
    assert after["other model"]["error"] == "ModelError"
    assert "num_layers: 2 -> 3" in after["other model"]["said"]


def test_the_best_checkpoint_stays_beside_the_newest(after):
    assert after["best"] == {"folders": ["step_000005", "step_000008"], "latest": "step_000008", "best": "step_000005"}


def test_the_newest_checkpoints_stay_and_one_of_the_same_step_is_replaced(after):
    assert after["kept after 3"] == {"folders": ["step_000001", "step_000003"], "latest": "step_000003"}
    assert after["kept after 4"] == {"folders": ["step_000003", "step_000004_2"], "latest": "step_000004_2"}


def test_a_run_can_be_rolled_back_by_hand_and_a_missing_checkpoint_is_said(after):
    assert after["rolled back"] == 3
    assert after["missing"]["error"] == "CheckpointError"
    assert "names step_000009" in after["missing"]["said"]
