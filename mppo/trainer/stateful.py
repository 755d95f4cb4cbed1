"""What a checkpoint consists of: whoever holds state says how it is saved. Nobody needs to inherit from these."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """State that is the same on every rank, and small: it is written once, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class PerRankStateful(Protocol):
    """State of which every rank has its own: numbers, texts and tensors in dicts and lists.

    The next run may have more ranks or fewer. So each rank is offered what all of them saved, in order of the ranks
    then, and takes its share: `states[rank::world_size]`, say. A state is read from disk when it is looked at.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None: ...


@runtime_checkable
class ShardedStateful(Protocol):
    """State that lies in shards over the ranks, and that they save and load together: a role."""

    def save(self, folder: Path) -> None:
        """Collective; the folder is there and empty."""

    def load(self, folder: Path) -> None:
        """Collective; the layout may be another than that of the save."""

    def rescue(self, file: Path) -> int:
        """Without others: write what this rank holds; returns how often it was updated, which all ranks compare."""
        ...

    def take_up(self, file: Path) -> None:
        """Without others: what this rank has rescued; the layout is the same."""


State = Stateful | PerRankStateful | ShardedStateful
