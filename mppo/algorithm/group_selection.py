"""Which groups of answers a step trains on with dynamic sampling: those with a signal (DAPO, 2503.14476)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def has_signal(values: Sequence[float]) -> bool:
    """Whether a group's answers are not all worth the same."""
    return bool(values) and max(values) != min(values)


@dataclass(frozen=True)
class Selection:
    """A choice of groups by their numbers, in order, and what became of the others."""

    chosen: list[int]
    used_without_signal: int
    """Groups without a signal that fill the step up."""
    left_over: int
    """Groups with a signal that are not needed yet."""


def select_groups(with_signal: Iterable[int], without_signal: Iterable[int], wanted: int) -> Selection:
    """The oldest `wanted` groups with a signal, filled up with the oldest of those without."""
    signal, silent = sorted(with_signal), sorted(without_signal)
    filling = silent[: max(wanted - len(signal), 0)]
    chosen = signal[:wanted]
    return Selection(sorted([*chosen, *filling]), len(filling), len(signal) - len(chosen))
