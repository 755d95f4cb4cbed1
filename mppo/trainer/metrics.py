"""Metrics of a training step, each exact over the global batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from mppo.batch.packed import PackedBatch
from mppo.trainer.batches import TrajectoryTable


class MeanOverUpdates:
    """The mean of each metric over the optimizer steps of a training step; the first and last where they tell more."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._updates: list[dict[str, float]] = []

    def add(self, metrics: dict[str, float]) -> None:
        self._updates.append({k if k.startswith(self.prefix) else self.prefix + k: v for k, v in metrics.items()})

    def metrics(self) -> dict[str, float]:
        count = len(self._updates)
        means = {name: sum(u[name] for u in self._updates) / count for name in self._updates[0]}
        means[self.prefix + "lr"] = self._updates[-1][self.prefix + "lr"]
        means[self.prefix + "optimizer_steps"] = float(count)
        if self.prefix + "ratio_deviation" in means:
            means[self.prefix + "first_ratio_deviation"] = self._updates[0][self.prefix + "ratio_deviation"]
        return means


def trajectory_metrics(table: TrajectoryTable) -> dict[str, float]:
    """Rewards, lengths and groups, from what every rank knows of all trajectories."""
    by_group: dict[int, set[float]] = {}
    for group, reward in zip(table.groups, table.rewards, strict=True):
        by_group.setdefault(group, set()).add(reward)
    silent = sum(len(rewards) == 1 for rewards in by_group.values())
    return {
        **_spread("reward", table.rewards),
        "reward/accuracy": sum(table.accuracies) / len(table),
        "reward/groups_without_signal": silent / len(by_group),
        **_spread("response_length", [float(n) for n in table.actions]),
        "batch/tokens": float(sum(table.lengths)),
        "batch/trajectories": float(len(table)),
    }


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def batch_metrics(packed: PackedBatch, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Advantages, and how far the trainer's policy is from the one that generated, over all actions."""
    mask = packed.mask
    advantages = packed.advantages[mask].double()
    mismatch = (packed.old_log_probs - packed.rollout_log_probs)[mask].double()
    sums = torch.stack(
        [
            mask.sum().double(),
            advantages.sum(),
            advantages.square().sum(),
            mismatch.abs().sum(),
            -mismatch.sum(),
        ]
    )
    count, total, squares, distance, kl = reduce_sum(sums).tolist()
    count = max(count, 1.0)
    mean = total / count
    return {
        "advantage/mean": mean,
        "advantage/std": max(squares / count - mean * mean, 0.0) ** 0.5,
        "rollout/log_prob_distance": distance / count,
        "rollout/kl_to_trainer": kl / count,
    }
