"""Which groups of answers a step trains on with dynamic sampling: those with a signal (DAPO, 2503.14476)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """A choice of groups, and what became of the others."""

    chosen: list[int]
    with_signal: int
    """Of all groups drawn."""
    without_signal: int
    used_without_signal: int
    """Groups without signal that fill the step up, because no more prompts are drawn."""

    def metrics(self, batches: int) -> dict[str, float]:
        """`batches` of prompts were drawn."""
        drawn = self.with_signal + self.without_signal
        return {
            "rollout/generation_batches": float(batches),
            "rollout/groups_without_signal": float(self.without_signal),
            "rollout/groups_without_signal_used": float(self.used_without_signal),
            "rollout/groups_left_out": float(drawn - len(self.chosen)),
        }


def has_signal(values: Sequence[float]) -> bool:
    """Whether a group's answers are not all worth the same."""
    return max(values) != min(values)


def select_groups(values: Mapping[int, Sequence[float]], wanted: int) -> Selection:
    """The first `wanted` groups with signal, filled up with the first of those without.

    `values` are what the answers of each group are worth; order is by the group's number.
    """
    signal = [group for group in sorted(values) if has_signal(values[group])]
    silent = [group for group in sorted(values) if not has_signal(values[group])]
    filling = silent[: max(wanted - len(signal), 0)]
    chosen = sorted(signal[:wanted] + filling)
    return Selection(chosen, len(signal), len(silent), len(filling))
