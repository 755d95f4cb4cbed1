"""A checkpoint that every rank writes its part of by itself, when they cannot save together any more."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mppo.errors import CheckpointError
from mppo.trainer.config_changes import Change
from mppo.trainer.manifest import Manifest, RunDescription, write_durably
from mppo.trainer.stateful import PerRankStateful, ShardedStateful, State, Stateful

OF_THE_LAYOUT = ("parallel.", "critic.parallel.", "model.make_vocab_size_divisible_by")


@dataclass(frozen=True)
class Rescue:
    """Of one rank; the store is all that it shares with others."""

    folder: Path
    """Of all checkpoints."""
    states: dict[str, State]
    run: RunDescription

    def write(self, store: dist.Store, step: int, weight_version: int, before: Mapping[str, dict[str, Any]]) -> str:
        """Put down what this rank holds, and on the first rank make a checkpoint of it once all have; returns what came
        of it, in words.

        `before` are states as they were before the step that failed, for those that it may have changed.
        """
        try:
            target = self.folder / self._agreed_name(store, step)
            told: dict[str, Any] = {"updates": self._write_own(target, before)}
        except Exception as error:
            told = {"error": f"rank {dist.get_rank()}: {type(error).__name__}: {error}"}
        store.set(f"rescued/{dist.get_rank()}", json.dumps(told))
        if dist.get_rank():
            return ""
        try:
            self._complete(store, target, step, weight_version)
        except Exception as error:
            return f"what was trained since the last checkpoint could not be saved: {error}"
        return f"what was trained is saved in {target}; the same command goes on from it, under the same layout"

    def _agreed_name(self, store: dist.Store, step: int) -> str:
        """The first rank chooses it."""
        if dist.get_rank() == 0:
            taken = len(list(self.folder.glob(f"step_{step:06d}_rescued*")))
            store.set("folder", f"step_{step:06d}_rescued" + (f"_{taken + 1}" if taken else ""))
        return store.get("folder").decode()

    def _write_own(self, target: Path, before: Mapping[str, dict[str, Any]]) -> dict[str, int]:
        """Returns how often each role was updated."""
        updates = {}
        for name, state in self.states.items():
            (target / name).mkdir(parents=True, exist_ok=True)
            if isinstance(state, ShardedStateful):
                updates[name] = state.rescue(rank_file(target / name))
            else:
                write_part(state, before.get(name) or state.state_dict(), target / name)
        return updates

    def _complete(self, store: dist.Store, target: Path, step: int, weight_version: int) -> None:
        """Raises CheckpointError for a rank that could not write its part, and for ranks that are not as far."""
        told = [json.loads(store.get(f"rescued/{rank}")) for rank in range(dist.get_world_size())]
        if errors := [rank["error"] for rank in told if "error" in rank]:
            raise CheckpointError(errors[0])
        if any(rank != told[0] for rank in told):
            raise CheckpointError("some ranks had made an update that others had not")
        Manifest(step, weight_version, list(self.states), self.run, rescued=True).write(target)
        write_durably(self.folder / "latest", target.name.encode())


def refuse_other_layout(changes: list[Change], source: Path) -> None:
    """Raise CheckpointError where a rescued checkpoint meets another layout than its own."""
    other = [str(c) for c in changes if c.path.startswith(OF_THE_LAYOUT) or c.path.endswith("distributed_optimizer")]
    other = [text for text in other if not text.startswith("parallel.timeout_minutes")]
    if other:
        raise CheckpointError(
            f"{source} was put down rank by rank, as its run failed, and needs the layout that it had"
            f" ({'; '.join(other)}); go on under that for a step with trainer.save_freq=1, then change it"
        )


def write_part(state: Stateful | PerRankStateful, content: dict[str, Any], folder: Path) -> None:
    """What this rank writes of the content of a state: its own, or the first rank that of all."""
    if isinstance(state, PerRankStateful):
        payload = io.BytesIO()
        torch.save(content, payload)
        write_durably(rank_file(folder), payload.getvalue())
    elif dist.get_rank() == 0:
        write_durably(folder / "state.json", json.dumps(content, indent=1).encode())


def rank_file(folder: Path, rank: int | None = None) -> Path:
    """Where a rank keeps a state of its own; this rank, where none is given."""
    return folder / f"rank_{dist.get_rank() if rank is None else rank:05d}.pt"
