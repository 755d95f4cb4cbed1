"""Metrics of a training step, each exact over the global batch."""

import torch
from torch import Tensor

from mppo.algorithm.statistics import Statistics, add_up, mean, mean_and_extremes, numbers, std
from mppo.batch.packed import PackedBatch
from mppo.batch.table import TrajectoryTable
from mppo.trainer.roles import Update


class MeanOverUpdates:
    """Metrics of all optimizer steps of a training step: means over all their tokens; totals and norms averaged."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self._statistics: list[Statistics] = []
        self._steps: list[dict[str, float]] = []
        self._skipped = 0

    def add(self, update: Update | None, corrected: Statistics | None = None) -> None:
        """An update, or None for one that was left out; `corrected`: what was known of the mini-batch before its
        training pass."""
        if update is None:
            self._skipped += 1
        else:
            self._statistics.append(update.statistics | (corrected or {}))
            self._steps.append(update.numbers)

    @property
    def count(self) -> int:
        """Of the updates that were made."""
        return len(self._steps)

    def metrics(self) -> dict[str, float]:
        count, made = self.count, self.prefix + "optimizer_steps"
        of_steps = {made: float(count), self.prefix + "skipped_steps": float(self._skipped)}
        if not count:
            return of_steps
        summed = add_up(self._statistics)
        means = {name: s.value / (count if s.is_total else 1) for name, s in summed.items()}
        means |= {self.prefix + name: sum(step[name] for step in self._steps) / count for name in self._steps[0]}
        means[self.prefix + "lr"] = self._steps[-1]["lr"]
        if (deviation := self._statistics[0].get(self.prefix + "ratio_deviation")) is not None:
            means[self.prefix + "first_ratio_deviation"] = deviation.value
        return means | of_steps


def throughput(metrics: dict[str, float], peak_bytes: list[int]) -> dict[str, float]:
    """Of a training step with these metrics; `peak_bytes` are the most memory that each rank has held so far."""
    per_second = metrics["batch/tokens"] / metrics["time/train_step"]
    return {
        "throughput/tokens_per_second": per_second,
        "throughput/tokens_per_second_per_rank": per_second / len(peak_bytes),
        "memory/peak_gib": max(peak_bytes) / 2**30,
    }


def trajectory_metrics(table: TrajectoryTable, weight_version: int) -> dict[str, float]:
    """Rewards, lengths, groups and staleness, from what every rank knows of all trajectories.

    Staleness is how many updates of the actor a trajectory's weights are behind `weight_version`, the number of those
    that were made: its mean over actions, and the largest.
    """
    summaries, count = table.summaries, len(table)
    rewards = [summary.reward for summary in summaries]
    by_group: dict[int, set[float]] = {}
    for group, summary in zip(table.groups, summaries, strict=True):
        by_group.setdefault(group, set()).add(summary.reward)
    statistics = _spread("reward", rewards) | _spread("response_length", table.actions)
    statistics |= _spread("prompt_length", [summary.prompt_length for summary in summaries])
    statistics["reward/accuracy"] = mean(*_all([summary.accuracy for summary in summaries]))
    if len(by_group) < count:  # with one answer per prompt a group has no signal of its own
        statistics["reward/groups_without_signal"] = mean(*_all([len(seen) == 1 for seen in by_group.values()]))
    for source in sorted({summary.source for summary in summaries if summary.source is not None}):
        own = [summary.reward for summary in summaries if summary.source == source]
        statistics[f"reward/source/{source}"] = mean(*_all(own))
    for name in sorted({name for summary in summaries for name in summary.parts}):
        given = [summary.parts[name] for summary in summaries if name in summary.parts]
        statistics[f"reward/part/{name}"] = mean(*_all(given))
    statistics["rollout/truncated_share"] = mean(*_all(table.truncated))
    told = [s for s in summaries if s.oldest_version is not None]
    oldest = min((s.oldest_version for s in told), default=weight_version)
    behind = sum(s.actions * (weight_version - s.mean_version) for s in told)
    return numbers(statistics) | {
        "reward/abstained": float(table.left_out.abstained),
        "reward/without_baseline": float(table.left_out.without_baseline),
        "rollout/aborted": float(table.left_out.aborted),
        "rollout/staleness/mean": behind / max(sum(s.actions for s in told), 1),
        "rollout/staleness/max": float(weight_version - oldest),
        "batch/tokens": float(sum(table.lengths)),
        "batch/trajectories": float(count),
    }


def _spread(name: str, values: list) -> Statistics:
    return mean_and_extremes(name, *_all(values))


def _all(values: list) -> tuple[Tensor, Tensor]:
    """As a vector, and a mask that hides nothing."""
    return torch.tensor(values, dtype=torch.double), torch.ones(len(values), dtype=torch.bool)


def batch_statistics(packed: PackedBatch) -> Statistics:
    """Advantages over what trains, and how much of the actions that is, before any rejection in bypass mode."""
    advantages = packed["advantages"]
    return {
        "batch/kept_share": mean(packed.loss_mask, packed.mask),
        "advantage/mean": mean(advantages, packed.loss_mask),
        "advantage/std": std(advantages, packed.loss_mask, unbiased=False),
    }
