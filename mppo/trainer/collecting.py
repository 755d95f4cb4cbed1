"""Which groups of answers a step trains on: all, or with dynamic sampling those with a signal (DAPO, 2503.14476)."""

from collections import defaultdict
from dataclasses import dataclass

from mppo.megatron.collectives import gather_from_all
from mppo.trainer.replay import Rollout


@dataclass(frozen=True)
class Selection:
    """A choice of groups, and what became of the others."""

    chosen: list[int]
    with_signal: int
    """Of all groups drawn."""
    without_signal: int
    used_without_signal: int
    """Groups without signal that fill the step up, because the bound on batches was reached."""

    def metrics(self, batches: int) -> dict[str, float]:
        """`batches` of prompts were drawn."""
        drawn = self.with_signal + self.without_signal
        return {
            "rollout/generation_batches": float(batches),
            "rollout/groups_without_signal": float(self.without_signal),
            "rollout/groups_without_signal_used": float(self.used_without_signal),
            "rollout/groups_left_out": float(drawn - len(self.chosen)),
        }


def has_signal(values: list[float]) -> bool:
    """Whether a group's answers are not all worth the same."""
    return max(values) != min(values)


def select_groups(values: dict[int, list[float]], wanted: int) -> Selection:
    """The first `wanted` groups with signal, filled up with the first of those without.

    `values` are what the answers of each group are worth; order is by the group's number.
    """
    signal = [group for group in sorted(values) if has_signal(values[group])]
    silent = [group for group in sorted(values) if not has_signal(values[group])]
    filling = silent[: max(wanted - len(signal), 0)]
    chosen = sorted(signal[:wanted] + filling)
    return Selection(chosen, len(signal), len(silent), len(filling))


def values_of_groups(rollout: Rollout, metric: str) -> dict[int, list[float]]:
    """Reward or accuracy of all answers by group, over all ranks. Collective."""
    mine = [(t.group, t.total_reward if metric == "reward" else t.accuracy) for t in rollout.trajectories]
    values: dict[int, list[float]] = defaultdict(list)
    for lines in gather_from_all(mine):
        for group, value in lines:
            values[group].append(value)
    return dict(values)


def greedy_rewards(rollout: Rollout) -> dict[int, float]:
    """Total reward of the greedy answer to each prompt, by group, over all ranks. Collective."""
    everyone = gather_from_all([(t.group, t.total_reward) for t in rollout.greedy])
    return {group: reward for lines in everyone for group, reward in lines}
