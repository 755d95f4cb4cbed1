"""Saves and resumes in a run's folder, and is killed in the middle of a save.

torchrun --nproc-per-node 3 run_folder_worker.py RESULTS FOLDER    saves, and waits to be killed
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mppo.config import Config, ModelSource, OptimConfig
from mppo.errors import MppoError
from mppo.megatron import topology
from mppo.megatron.model import build_chunks
from mppo.megatron.random_state import RandomState
from mppo.trainer.checkpoints import Checkpoints
from mppo.trainer.launcher import end_with_launcher
from mppo.trainer.manifest import RunDescription
from mppo.trainer.roles import TrainableRole
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel, open_model


class Counter:
    """The same on every rank."""

    def __init__(self):
        self.count, self.third = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "third": self.third}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.third = state["count"], state["third"]


class Groups:
    """Every rank has its own, of which the next run's ranks take turns."""

    def __init__(self, names: Sequence[str] = ()):
        self.names = list(names)

    def state_dict(self) -> dict[str, Any]:
        return {"names": self.names, "tokens": torch.arange(len(self.names))}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        mine = states[dist.get_rank() :: dist.get_world_size()]
        self.names = [name for state in mine for name in state["names"]]


class Failing:
    """Does what it is told to when it is saved, after everything before it is written."""

    def __init__(self):
        self.act: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        self.act()
        return {}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        pass


class Run:
    def __init__(self, folder: Path):
        self.place = topology.initialize(Config().parallel, seed=1)
        self.folder, self.model = folder / "checkpoints", open_model(ModelSource(preset="char", dtype="float32"), 1)
        chunks = build_chunks(self.model.config, Config().parallel, self.model.dtype)
        load(chunks, self.model.architecture, self.model.config, self.model.source, self.place)
        self.actor = TrainableRole(chunks, self.place, OptimConfig(use_distributed_optimizer=True), self.model.dtype)
        self.counter, self.groups, self.failing = Counter(), Groups(), Failing()

    def checkpoints(
        self, model: PretrainedModel | None = None, keep: int | None = None, config: Config | None = None
    ) -> Checkpoints:
        states = {
            "actor": self.actor,
            "counter": self.counter,
            "groups": self.groups,
            "random": RandomState(self.place),
            "failing": self.failing,
        }
        run = RunDescription.of(config or Config(), {"actor": model or self.model}, dist.get_world_size())
        return Checkpoints(self.folder, states, run, keep)

    def weight(self) -> float:
        return float(sum(p.detach().double().sum() for p in self.actor.chunks[0].parameters()))

    def seen(self) -> dict[str, list[str] | str]:
        """What is in the folder."""
        dist.barrier()
        folders = sorted(path.name for path in self.folder.glob("step_*"))
        latest = (self.folder / "latest").read_text()
        dist.barrier()
        return {"folders": folders, "latest": latest}

    def point_to(self, name: str) -> None:
        """As a user may do by hand."""
        if dist.get_rank() == 0:
            (self.folder / "latest").write_text(name)
        dist.barrier()


def killed(results: Path, folder: Path) -> None:
    """Saves after step 1, and waits in the midst of the save after step 2 until it is killed."""
    end_with_launcher()
    run = Run(folder)
    run.counter.count, run.counter.third = 1, 1 / 3
    run.groups.names = [f"rank {dist.get_rank()}"]
    run.checkpoints().save(1, weight_version=1)
    if dist.get_rank() == 0:
        results.write_text(json.dumps({"weight": run.weight()}))

    def wait() -> None:
        (folder / f"waiting-{dist.get_rank()}").touch()
        time.sleep(300)

    for parameter in run.actor.chunks[0].parameters():
        parameter.data.zero_()
    run.counter.count = 2
    run.failing.act = wait
    run.checkpoints().save(2, weight_version=2)


def after(folder: Path) -> dict[str, Any]:
    """Goes on from there with fewer ranks, and meets all kinds of trouble."""
    run = Run(folder)
    found: dict[str, Any] = {"before": run.seen()}
    resumed = run.checkpoints().resume()
    found["resumed"] = {
        "step": resumed.manifest.step,
        "weight": run.weight(),
        "counter": run.counter.state_dict(),
        "lines": resumed.lines(),
    }
    dist.all_gather_object(names := [None] * dist.get_world_size(), run.groups.names)
    found["resumed"]["groups"] = names

    def full_disk() -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    def broken() -> None:
        raise ZeroDivisionError

    run.failing.act = full_disk
    found["full disk"] = refusal(lambda: run.checkpoints().save(3, 3)) | run.seen()
    run.failing.act = broken
    found["broken"] = refusal(lambda: run.checkpoints().save(3, 3)) | run.seen()
    run.failing.act = lambda: None

    changed = Config()
    changed.actor.optim.lr, changed.trainer.save_freq = 0.5, 7
    found["changed"] = refusal(lambda: run.checkpoints(config=changed).resume())
    found["allowed"] = run.checkpoints(config=changed).resume(allow_changes=True).lines()
    other = replace(run.model, config=replace(run.model.config, num_layers=3))
    found["other model"] = refusal(lambda: run.checkpoints(model=other).resume(allow_changes=True))

    checkpoints = run.checkpoints(keep=2)
    for step in (3, 4, 4):
        checkpoints.save(step, step)
        found[f"kept after {step}"] = run.seen()
    for step, score in ((5, 0.9), (6, 0.9), (7, 0.2), (8, None)):
        run.checkpoints(keep=1).save(step, step, score)
    found["best"] = run.seen() | {"best": (run.folder / "best").read_text()}
    checkpoints.save(3, 3)
    run.point_to("step_000003")
    found["rolled back"] = run.checkpoints().resume().manifest.step
    run.point_to("step_000009")
    found["missing"] = refusal(lambda: run.checkpoints().resume())
    topology.shutdown()
    return found


def refusal(act: Callable[[], Any]) -> dict[str, str]:
    try:
        act()
    except MppoError as error:
        return {"error": type(error).__name__, "said": str(error)}
    return {"error": "", "said": ""}


if __name__ == "__main__":
    killed(*map(Path, sys.argv[1:]))
