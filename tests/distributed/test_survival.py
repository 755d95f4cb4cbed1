"""Losses that are not finite, and ranks that fail alone: nothing that was trained is lost, the cause is named once."""

import json
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.ranks import run_on_ranks
from tests.distributed.train_runs import _arguments, _command, train, train_killed, train_refused

pytestmark = pytest.mark.distributed

LOSS = "actor.policy_loss.loss_mode=tests.distributed.failing_losses:troubled"
SHORT = (
    "trainer.total_training_steps=4",
    "data.train_batch_size=8",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=8",
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "actor.calculate_entropy=false",
    LOSS,
)


def trouble(folder: Path, **how) -> tuple[tuple[str, ...], Path]:
    """Overrides, and the file without which nothing goes wrong."""
    there = folder / "trouble"
    there.touch()
    return (*SHORT, *(f"actor.policy_loss.{k}={v}" for k, v in {"while_there": there, **how}.items())), there


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untroubled")
    overrides, there = trouble(folder)
    there.unlink()
    return train("class", 2, folder / "run", *overrides)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_what_is_not_finite_is_seen_before_the_step_and_saved(tmp_path, untroubled, how):
    overrides, there = trouble(tmp_path, how=how)
    output = train_refused("class", 2, tmp_path / "run", *overrides)
    assert "no step was made" in output and "trainer.on_non_finite=skip leaves such steps out" in output
    there.unlink()
    resumed = train("class", 2, tmp_path / "run", *overrides)
    assert "2 steps, weight version 2" in resumed.output
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert resumed.column(name) == pytest.approx(untroubled.column(name), rel=1e-6), name


def test_steps_that_are_not_finite_are_left_out_and_counted(tmp_path, untroubled):
    overrides, _ = trouble(tmp_path, how="gradient")
    run = train("class", 2, tmp_path / "run", *overrides, "trainer.on_non_finite=skip")
    assert run.column("actor/skipped_steps") == [0, 0, 1, 0]
    assert run.column("actor/optimizer_steps") == [1, 1, 0, 1]
    assert run.column("actor/grad_norm")[:2] == pytest.approx(untroubled.column("actor/grad_norm")[:2], rel=1e-6)


RECORDED = (
    "trainer.total_training_steps=6",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.save_hf_freq=3",
    "data.val.options.size=8",
    "trainer.keep_checkpoints=1",
)


def records(folder: Path) -> dict:
    """All that a run leaves, but for times, memory and what it says at its start."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "throughput/", "memory/")
    log = [line for line in (folder / "train.log").read_text().splitlines() if line.startswith(("step ", "held-out"))]
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        "rows": [kept for row in rows if len(kept := {k: v for k, v in row.items() if not k.startswith(timed)}) > 1],
        "log": [line.partition("  s/step")[0] for line in log],
        "tensorboard": [event.step for event in events.Scalars("actor/loss")],
        "validations": [(event.step, event.value) for event in events.Scalars("val/accuracy")],
        "samples": {path.name: path.read_text() for path in (folder / "samples").iterdir()},
        "exports": sorted(path.name for path in folder.glob("hf*")),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def test_a_run_that_was_killed_leaves_what_one_leaves_that_was_not(tmp_path):
    overrides, there = trouble(tmp_path)
    there.unlink()
    train("class", 2, tmp_path / "whole", *overrides, *RECORDED)
    train_killed("class", 2, tmp_path / "killed", *overrides, *RECORDED)
    train("class", 2, tmp_path / "killed", *overrides, *RECORDED)
    whole, resumed = records(tmp_path / "whole"), records(tmp_path / "killed")
    assert len(whole["rows"]) == 10 and len(whole["log"]) == 10 and len(whole["samples"]) == 6
    assert [step for step, _ in whole["validations"]] == [0, 2, 4, 6]
    for name, expected in whole.items():
        assert resumed[name] == expected, name


PROMISED = [
    "prompt_length/mean",
    "response_length/mean",
    "rollout/truncated_share",
    "reward/failure_rate",
    "throughput/tokens_per_second",
    "throughput/tokens_per_second_per_rank",
    "memory/peak_gib",
    "time/train_step",
    "time/report",
    "time/validate",
    "time/save",
    "time/export",
    "val/accuracy",
    "val/pass@1",
    "val/pass@2",
    "val/truncated_share",
]


def test_metrics_that_are_promised_are_reported_and_warnings_logged(tmp_path):
    overrides, there = trouble(tmp_path)
    there.unlink()
    more = ("rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1", "actor.ppo_mini_batch_size=3")
    run = train("class", 2, tmp_path / "run", *overrides, *RECORDED, *more, "trainer.total_training_steps=4")
    for name in PROMISED:
        assert min(run.column(name)) >= 0, name
    assert min(run.column("throughput/tokens_per_second")) > 0 and min(run.column("memory/peak_gib")) > 0.1
    assert run.column("prompt_length/mean") == [2.0] * 4
    assert run.column("actor/optimizer_steps") == [3] * 4
    warning = "actor.ppo_mini_batch_size=3 does not divide data.train_batch_size=8: optimizer steps take 3 or 2 prompts"
    assert warning in (tmp_path / "run/train.log").read_text()
    assert run.output.rstrip().splitlines()[-1].startswith("held-out accuracy: ")


def test_a_run_that_starts_anew_leaves_nothing_of_the_one_before_among_its_own(tmp_path):
    overrides, there = trouble(tmp_path)
    there.unlink()
    first = (*overrides, *RECORDED, "trainer.total_training_steps=4")
    train("class", 2, tmp_path / "run", *first)
    anew = (*overrides, "trainer.resume=false", "trainer.total_training_steps=1", "trainer.save_hf=false")
    train("class", 2, tmp_path / "run", *anew)
    own = {path.name for path in (tmp_path / "run").iterdir()}
    described = {"config.yaml", "packages.txt", "run.lock", "train.log", "learning_curve.png", "superseded_1"}
    assert own == {*described, "metrics.jsonl", "samples", "tensorboard"}
    assert [path.name for path in (tmp_path / "run/samples").iterdir()] == ["step_000001.jsonl"]
    old = tmp_path / "run/superseded_1"
    assert (old / "checkpoints/latest").read_text() == "step_000004"
    assert len((old / "metrics.jsonl").read_text().splitlines()) >= 7
    assert len(list((old / "samples").iterdir())) == 4
    assert "total_training_steps: 1" in (tmp_path / "run/config.yaml").read_text()
    assert "megatron-core==" in (tmp_path / "run/packages.txt").read_text()


def test_too_many_in_a_row_end_the_run(tmp_path):
    overrides, _ = trouble(tmp_path, how="loss", call=2, stays="true")
    skip = ("trainer.on_non_finite=skip", "trainer.max_skipped_steps=1")
    output = train_refused("class", 2, tmp_path / "run", *overrides, *skip)
    assert "it is the 2th step in a row, more than trainer.max_skipped_steps=1" in output
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000002"


def test_a_rank_that_fails_alone_ends_all_and_what_was_trained_is_saved(tmp_path, untroubled):
    """The others wait for it in a collective, whose time-out of half an hour is not waited for."""
    overrides, there = trouble(tmp_path, how="raise")
    started = time.monotonic()
    ended = run_on_ranks(_command, 2, _arguments("train", "class", tmp_path / "run", overrides), timeout=200)
    assert time.monotonic() - started < 90
    assert set(ended.exit_codes) == {3}, ended.tails
    assert ended.output.count("failed alone") == 1 and ended.output.count("RuntimeError: this rank alone") == 1
    assert "mppo: rank 1 failed alone" in ended.outputs[1]
    assert "what was trained is saved in" in ended.outputs[0]
    latest = tmp_path / "run/checkpoints" / (tmp_path / "run/checkpoints/latest").read_text()
    assert latest.name == "step_000002_rescued" and json.loads((latest / "manifest.json").read_text())["rescued"]
    there.unlink()
    other = (*overrides, "parallel.pipeline_model_parallel_size=2")
    assert "needs the layout that it had" in train_refused("class", 2, tmp_path / "run", *other)
    resumed = train("class", 2, tmp_path / "run", *overrides)
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert resumed.column(name) == pytest.approx(untroubled.column(name), rel=1e-6), name
