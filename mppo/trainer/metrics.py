"""Metrics of a training step, each exact over the global batch."""

import torch

from mppo.algorithm.reduction import Reduction
from mppo.algorithm.statistics import Ratio, add_up
from mppo.batch.packed import PackedBatch
from mppo.trainer.batches import TrajectoryTable


class MeanOverUpdates:
    """Metrics of all optimizer steps of a training step: means over all their tokens; totals and norms averaged."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._statistics: list[dict[str, Ratio]] = []
        self._steps: list[dict[str, float]] = []
        self._prepared: list[dict[str, float]] = []

    def add(
        self, statistics: dict[str, Ratio], stepped: dict[str, float], prepared: dict[str, float] | None = None
    ) -> None:
        """`prepared`: numbers about the mini-batch that were known before its training pass; they are averaged."""
        self._statistics.append(statistics)
        self._steps.append(stepped)
        self._prepared.append(prepared or {})

    def metrics(self) -> dict[str, float]:
        count = len(self._steps)
        summed = add_up(self._statistics)
        means = {name: ratio.value / (count if ratio.is_total else 1) for name, ratio in summed.items()}
        means[self.prefix + "grad_norm"] = sum(step["grad_norm"] for step in self._steps) / count
        means[self.prefix + "lr"] = self._steps[-1]["lr"]
        means[self.prefix + "optimizer_steps"] = float(count)
        for name in self._prepared[0]:
            means[name] = sum(prepared[name] for prepared in self._prepared) / count
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
    """Advantages, and how far the trainer's policy is from the one that generated, over all actions."""
    mask = packed.training
    advantages = packed.advantages[mask].double()
    mismatch = (packed.old_log_probs - packed.rollout_log_probs)[mask].double()
    sums = torch.stack(
        [
            mask.sum().double(),
            packed.mask.sum().double(),
            advantages.sum(),
            advantages.square().sum(),
            mismatch.abs().sum(),
            -mismatch.sum(),
        ]
    )
    count, actions, total, squares, distance, kl = reduction.sum(sums).tolist()
    kept_share, count = count / max(actions, 1.0), max(count, 1.0)
    mean = total / count
    return {
        "batch/kept_share": kept_share,
        "advantage/mean": mean,
        "advantage/std": max(squares / count - mean * mean, 0.0) ** 0.5,
        "rollout/log_prob_distance": distance / count,
        "rollout/kl_to_trainer": kl / count,
    }
