"""What a checkpoint says of its run, and what a run makes of another's."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mppo.config import Config, ModelSource
from mppo.errors import CheckpointError, ConfigError, ModelError
from mppo.trainer.config_changes import FREE, Change, config_changes
from mppo.trainer.manifest import Manifest, ModelIdentity, RunDescription, write_durably
from mppo.trainer.run_lock import RunLock
from mppo.weights.pretrained import open_model

pytestmark = pytest.mark.unit


def saved(config: Config) -> dict:
    """As it comes back from a manifest."""
    return json.loads(json.dumps(asdict(config)))


@pytest.fixture(scope="module")
def model():
    return open_model(ModelSource(preset="char", dtype="float32"), seed=1)


@pytest.fixture
def manifest(model):
    config = Config(model=ModelSource(preset="char"))
    return Manifest(7, 5, ["actor", "random"], RunDescription.of(config, {"actor": model}, 4))


def test_the_same_configuration_has_no_changes():
    config = Config()
    config.rollout.stop = ["\n"]
    config.actor.policy_loss = {"clip_ratio": 0.1, "limits": (1, 2)}
    assert config_changes(saved(config), asdict(config)) == []


def test_what_trains_otherwise_is_named_with_both_values():
    before, now = Config(), Config()
    now.actor.optim.lr = 1e-3
    now.actor.policy_loss = {"clip_ratio": 0.1}
    now.data.train.files = ["b.jsonl"]
    now.parallel.tensor_model_parallel_size = 2
    changes = config_changes(saved(before), asdict(now))
    assert [str(change) for change in changes if not change.is_free] == [
        "actor.optim.lr: 1e-06 -> 0.001",
        "actor.policy_loss.clip_ratio: unset -> 0.1",
        "data.train.files: [] -> ['b.jsonl']",
    ]
    assert [change.path for change in changes if change.is_free] == ["parallel.tensor_model_parallel_size"]


def test_a_group_of_fields_that_is_given_in_one_configuration_only():
    before, now = Config(), Config()
    before.critic.recompute = before.model.recompute
    assert {change.path.rpartition(".")[0] for change in config_changes(saved(before), asdict(now))} <= {
        "critic",
        "critic.recompute",
    }
    assert all(change.is_free for change in config_changes(saved(before), asdict(now)))


def test_a_field_that_was_not_there_yet_counts_as_its_default():
    before, now = saved(Config()), Config()
    del before["actor"]["entropy_coeff"], before["algorithm"]["filter_groups"]
    assert config_changes(before, asdict(now)) == []
    now.actor.entropy_coeff = 0.1
    assert config_changes(before, asdict(now)) == [Change("actor.entropy_coeff", 0.0, 0.1)]


def test_a_field_that_is_no_more_is_named():
    before = saved(Config()) | {"gone": 1}
    assert config_changes(before, asdict(Config())) == [Change("gone", 1, "unset")]


@pytest.mark.parametrize("pattern", FREE)
def test_every_pattern_of_free_fields_is_of_some_field(pattern):
    config = Config()
    config.critic.recompute = config.model.recompute
    assert any(fnmatchcase(path, pattern) for path in flat(asdict(config)))


def flat(values, where=""):
    for key, value in values.items():
        yield from flat(value, f"{where}{key}.") if isinstance(value, dict) else [f"{where}{key}"]


@pytest.mark.parametrize(
    "path",
    ["actor.optim.lr", "data.train_batch_size", "trainer.seed", "data.train.files", "actor.policy_loss.loss_mode",
     "rollout.n", "algorithm.adv_estimator", "critic.optim.lr", "actor.ppo_mini_batch_size", "model.dtype",
     "trainer.critic_warmup", "actor.optim.grad_reduce_in_fp32"],
)  # fmt: skip
def test_what_trains_otherwise_is_not_free(path):
    assert not Change(path, 0, 1).is_free


def test_a_manifest_comes_back_as_it_was(manifest, tmp_path):
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert {"mppo", "torch", "megatron-core", "python"} == manifest.run.versions.keys()
    assert manifest.run.layout["world_size"] == 4


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no manifest.json"):
        Manifest.read(tmp_path)


def test_a_manifest_that_is_cut_off_or_newer_is_refused(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        Manifest.read(tmp_path)
    replace(manifest, format=99).write(tmp_path)
    with pytest.raises(CheckpointError, match="format 99"):
        Manifest.read(tmp_path)


def test_another_model_is_refused_by_what_differs(model, tmp_path):
    other = replace(model, config=replace(model.config, num_layers=3, rope_theta=1e6))
    with pytest.raises(ModelError, match=r"another actor model \(num_layers: 2 -> 3; rope_theta: 10000.0 -> 1000000.0"):
        ModelIdentity.of(model).check(ModelIdentity.of(other), "actor", tmp_path)


def test_padding_and_the_balance_loss_are_not_of_the_model(model, tmp_path):
    other = replace(model, config=replace(model.config, make_vocab_size_divisible_by=8, moe_aux_loss_coeff=0.1))
    ModelIdentity.of(model).check(ModelIdentity.of(other), "actor", tmp_path)


def test_a_durable_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "latest"
    write_durably(path, b"step_000010")
    write_durably(path, b"step_2")
    assert path.read_bytes() == b"step_2"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_use_is_refused_and_free_again_when_its_run_is_killed(tmp_path):
    holder = start_holder(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on "):
            RunLock(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    RunLock(tmp_path).release()
    RunLock(tmp_path).release()


def start_holder(folder):
    """Another process with the lock and a child of its own, which outlives it."""

    script = (
        "import os, sys, time\n"
        "from mppo.trainer.run_lock import RunLock\n"
        "lock = RunLock(sys.argv[1])\n"
        "if os.fork():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
        "else:\n"
        "    os.close(1)\n"
        "    time.sleep(5)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_worker_ends_when_its_launcher_is_killed(tmp_path):

    worker = (
        "import os, time\n"
        "from mppo.trainer.launcher import end_with_launcher\n"
        "end_with_launcher()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    os.kill(pid, 0)  # it lives
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it lives on")
