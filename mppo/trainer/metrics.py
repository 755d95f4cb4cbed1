"""Metrics of a training step, each exact over the global batch."""

from functools import reduce
from operator import add

import torch

from mppo.algorithm.reduction import Reduction
from mppo.algorithm.rollout_correction import PREFIX
from mppo.algorithm.statistics import Ratio, add_up
from mppo.algorithm.summary import Reduced
from mppo.batch.packed import PackedBatch
from mppo.trainer.batches import TrajectoryTable


class MeanOverUpdates:
    """Metrics of all optimizer steps of a training step: means over all their tokens; totals and norms averaged."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._statistics: list[dict[str, Ratio]] = []
        self._steps: list[dict[str, float]] = []
        self._prepared: list[Reduced] = []

    def add(self, statistics: dict[str, Ratio], stepped: dict[str, float], prepared: Reduced | None = None) -> None:
        """`prepared`: what was known of the mini-batch before its training pass."""
        self._statistics.append(statistics)
        self._steps.append(stepped)
        if prepared is not None:
            self._prepared.append(prepared)

    def metrics(self) -> dict[str, float]:
        count = len(self._steps)
        summed = add_up(self._statistics)
        means = {name: ratio.value / (count if ratio.is_total else 1) for name, ratio in summed.items()}
        means[self.prefix + "grad_norm"] = sum(step["grad_norm"] for step in self._steps) / count
        means[self.prefix + "lr"] = self._steps[-1]["lr"]
        means[self.prefix + "optimizer_steps"] = float(count)
        if self._prepared:
            means |= reduce(add, self._prepared).numbers(PREFIX)
        if (deviation := self._statistics[0].get(self.prefix + "ratio_deviation")) is not None:
            means[self.prefix + "first_ratio_deviation"] = deviation.value
        return means


def trajectory_metrics(table: TrajectoryTable) -> dict[str, float]:
    """Rewards, lengths and groups, from what every rank knows of all trajectories."""
    by_group: dict[int, set[float]] = {}
    for group, reward in zip(table.groups, table.rewards, strict=True):
        by_group.setdefault(group, set()).add(reward)
    metrics = {}
    if len(by_group) < len(table):  # with one answer per prompt a group has no signal of its own
        silent = sum(len(rewards) == 1 for rewards in by_group.values())
        metrics["reward/groups_without_signal"] = silent / len(by_group)
    for name in sorted({name for parts in table.parts for name in parts}):
        given = [parts[name] for parts in table.parts if name in parts]
        metrics[f"reward/part/{name}"] = sum(given) / len(given)
    return metrics | {
        **spread("reward", table.rewards),
        "reward/accuracy": sum(table.accuracies) / len(table),
        **spread("response_length", [float(n) for n in table.actions]),
        "batch/tokens": float(sum(table.lengths)),
        "batch/trajectories": float(len(table)),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Mean and extremes."""
    return {f"{name}/mean": sum(values) / len(values), f"{name}/min": min(values), f"{name}/max": max(values)}


def batch_metrics(packed: PackedBatch, reduction: Reduction) -> dict[str, float]:
    """Advantages over what trains, and how much of the actions that is, before any rejection in bypass mode."""
    mask = packed.loss_mask
    advantages = packed.advantages[mask].double()
    sums = [mask.sum().double(), packed.mask.sum().double(), advantages.sum(), advantages.square().sum()]
    count, actions, total, squares = reduction.sum(torch.stack(sums)).tolist()
    mean = total / max(count, 1.0)
    return {
        "batch/kept_share": count / max(actions, 1.0),
        "advantage/mean": mean,
        "advantage/std": max(squares / max(count, 1.0) - mean * mean, 0.0) ** 0.5,
    }


def mismatch_metrics(packed: PackedBatch, reduction: Reduction) -> dict[str, float]:
    """How far the anchor is from the policy that generated, over what trains."""
    mask = packed.loss_mask
    mismatch = (packed.old_log_probs - packed.rollout_log_probs)[mask].double()
    sums = [mask.sum().double(), mismatch.abs().sum(), -mismatch.sum()]
    count, distance, kl = reduction.sum(torch.stack(sums)).tolist()
    return {
        "rollout/log_prob_distance": distance / max(count, 1.0),
        "rollout/kl_to_trainer": kl / max(count, 1.0),
    }
