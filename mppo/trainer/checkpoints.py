"""Saving and resuming a run: a folder `step_*` for each checkpoint, the last good one named in `latest`."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mppo.errors import CheckpointError, ConfigError
from mppo.megatron.collectives import fail_together
from mppo.trainer.config_changes import Change, config_changes
from mppo.trainer.manifest import MANIFEST, Manifest, RunDescription, is_complete, write_durably, written_at
from mppo.trainer.rescue import rank_file, refuse_other_layout, write_part
from mppo.trainer.stateful import PerRankStateful, ShardedStateful, State


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    source: Path
    manifest: Manifest
    changes: list[Change]
    """Of the configuration."""
    started_anew: list[str]
    """States that the checkpoint does not have."""
    left_out: list[str]
    """States that only the checkpoint has."""

    def lines(self) -> list[str]:
        """For the user."""
        manifest = self.manifest
        headline = f"resuming from {self.source}: {manifest.step} steps, weight version {manifest.weight_version}"
        changes = [
            f"  {change}" + ("" if change.is_free else "  (trains otherwise; trainer.resume_changed=true)")
            for change in self.changes
        ]
        anew = [f"  {name} is not in the checkpoint and starts anew" for name in self.started_anew]
        left = [f"  {name} of the checkpoint is not used" for name in self.left_out]
        return [headline, *changes, *anew, *left]


class Checkpoints:
    """Saves and loads the states of a run, each in the way that it says itself, and knows nothing else of them.

    A save writes into a folder of its own, then the manifest, which makes the folder a checkpoint, then `latest`. So
    whenever it ends early, `latest` names the checkpoint before it; what is incomplete goes with the next save.
    """

    def __init__(self, folder: Path, states: dict[str, State], run: RunDescription, keep: int | None = None):
        """`keep` is how many checkpoints stay, besides the one of the best score; None: all."""
        self.folder, self.states, self.run, self.keep = folder, states, run, keep

    def save(self, step: int, weight_version: int, score: float | None = None) -> None:
        """Collective. `score` is what a validation found of these weights, the larger the better.

        Raises CheckpointError, on every rank, where the folder cannot be written; what there was then stays.
        """
        target = self._new_folder(step)
        for name, state in self.states.items():
            self._save(state, target / name)
        dist.barrier()
        with fail_together(), disk_errors(target):
            if dist.get_rank() == 0:
                Manifest(step, weight_version, list(self.states), self.run, score=score).write(target)
                write_durably(self.folder / "latest", target.name.encode())
                self._delete_old(target, step)

    def resume(self, *, allow_changes: bool = False) -> Resumed | None:
        """Load the checkpoint that `latest` names; None where there is none. Collective.

        Raises, on every rank and before anything is loaded, CheckpointError for a checkpoint that is not complete,
        ModelError for one of another model, and, without `allow_changes`, ConfigError for one of another
        configuration.
        """
        source = self._newest()
        if source is None:
            return None
        with fail_together():
            manifest = Manifest.read(source)
            for role in manifest.run.models.keys() & self.run.models.keys():
                manifest.run.models[role].check(self.run.models[role], role, source)
            changes = config_changes(manifest.run.config, self.run.config)
            if manifest.rescued:
                _refuse_other_ranks(manifest, self.run, source)
                refuse_other_layout(changes, source)
            if not allow_changes:
                _refuse(changes, source)
        for name, state in self.states.items():
            if name in manifest.states:
                self._load(state, source / name, manifest.rescued)
        return Resumed(
            source,
            manifest,
            changes,
            started_anew=[name for name in self.states if name not in manifest.states],
            left_out=[name for name in manifest.states if name not in self.states],
        )

    def _new_folder(self, step: int) -> Path:
        """Another than all that are complete, so that the last good one is not touched, of the same step neither."""
        name = [f"step_{step:06d}"]
        with fail_together(), disk_errors(self.folder):
            if dist.get_rank() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for folder in self.folder.glob("step_*"):
                    if not is_complete(folder) and folder.name != self._named():
                        shutil.rmtree(folder)
                taken = {folder.name for folder in self.folder.glob("step_*")}
                count = 1
                while name[0] in taken:
                    count += 1
                    name[0] = f"step_{step:06d}_{count}"
                for state in self.states:
                    (self.folder / name[0] / state).mkdir(parents=True)
        dist.broadcast_object_list(name, src=0)
        return self.folder / name[0]

    def _delete_old(self, newest: Path, step: int) -> None:
        """Checkpoints of the same step, which this one replaces, and all but the newest `keep` and the best."""
        complete = [folder for folder in self.folder.glob("step_*") if is_complete(folder) and folder != newest]
        replaced = [folder for folder in complete if f"{folder.name}_".startswith(f"step_{step:06d}_")]
        others = sorted((f for f in complete if f not in replaced), key=written_at)
        old = [] if self.keep is None else others[: max(len(others) + 1 - self.keep, 0)]
        best = _best([*others, newest])
        if best is not None:
            write_durably(self.folder / "best", best.name.encode())
            old = [folder for folder in old if folder != best]
        for folder in (*replaced, *old):
            (folder / MANIFEST).unlink()  # first, so that no half of it counts
            shutil.rmtree(folder)

    def _save(self, state: State, folder: Path) -> None:
        if isinstance(state, ShardedStateful):
            state.save(folder)
            return
        with fail_together(), disk_errors(folder):
            write_part(state, state.state_dict(), folder)

    def _load(self, state: State, folder: Path, is_rescued: bool) -> None:
        if isinstance(state, ShardedStateful) and not is_rescued:
            state.load(folder)
            return
        with fail_together(), disk_errors(folder):
            if isinstance(state, ShardedStateful):
                state.take_up(rank_file(folder))
            elif isinstance(state, PerRankStateful):
                state.load_state_dicts(SavedStates(folder))
            else:
                state.load_state_dict(json.loads((folder / "state.json").read_text()))

    def _newest(self) -> Path | None:
        """What rank 0 finds, so that all ranks decide alike. Raises CheckpointError when this rank cannot see it."""
        found = [self._named() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return None
        source = self.folder / found[0]
        with fail_together():
            if not source.is_dir():
                raise CheckpointError(
                    f"{self.folder / 'latest'} names {found[0]}, but {source} is not there; is trainer.out_dir on a"
                    " file system that all machines share? To start anew set trainer.resume=false"
                )
        return source

    def _named(self) -> str | None:
        """The name in `latest`."""
        latest = self.folder / "latest"
        return latest.read_text().strip() if latest.is_file() else None


class SavedStates(Sequence[dict[str, Any]]):
    """What each rank of a run saved of a state, read from disk when it is looked at."""

    def __init__(self, folder: Path):
        self.folder, self.ranks = folder, len(list(folder.glob("rank_*.pt")))

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(self.ranks))]
        if not -self.ranks <= rank < self.ranks:
            raise IndexError(f"{self.folder} has the states of {self.ranks} ranks, not of rank {rank}")
        return torch.load(rank_file(self.folder, rank % self.ranks), map_location="cpu", weights_only=True)


def _best(complete: list[Path]) -> Path | None:
    """The one with the largest score, of equal ones the oldest; None where none has any."""
    scores = {folder: Manifest.read(folder).score for folder in complete}
    scored = {folder: score for folder, score in scores.items() if score is not None}
    return max(scored, key=scored.__getitem__, default=None)


def _refuse_other_ranks(manifest: Manifest, now: RunDescription, source: Path) -> None:
    saved, ranks = manifest.run.layout["world_size"], now.layout["world_size"]
    if saved != ranks:
        raise CheckpointError(f"{source} was put down by {saved} ranks, each for itself; start as many, not {ranks}")


def _refuse(changes: list[Change], source: Path) -> None:
    changed = [str(change) for change in changes if not change.is_free]
    if changed:
        raise ConfigError(
            f"{source} was saved with another configuration (saved -> now):\n  "
            + "\n  ".join(changed)
            + "\nto go on with what is given now set trainer.resume_changed=true; to start anew give another"
            " trainer.out_dir, or trainer.resume=false"
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the file system inside become a CheckpointError that names the path."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error}; is there space, and may it be written? The last complete checkpoint is as it was"
        ) from error
