"""What an outcome is worth to the estimator: a penalty on length, normalisation over the run, a bound.

All follows from the table of the global batch, which every rank has, so every rank computes the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.batch.packed import PackedBatch
from mppo.config import OverlongBufferConfig, RewardConfig
from mppo.trainer.batches import TrajectoryTable
from mppo.trainer.metrics import spread


@dataclass
class RunningMoments:
    """Mean and deviation of all outcomes of a run; part of its checkpoints."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def update(self, values: list[float]) -> None:
        """Add a batch (Chan, Golub and LeVeque, 1979)."""
        count = self.count + len(values)
        if not count:
            return
        mean = sum(values) / max(len(values), 1)
        squares = sum((value - mean) ** 2 for value in values)
        delta = mean - self.mean
        self.squares += squares + delta**2 * self.count * len(values) / count
        self.mean += delta * len(values) / count
        self.count = count

    @property
    def deviation(self) -> float:
        """Unbiased; 1 while there is nothing to divide by."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation > 1e-8 else 1.0


def shape_outcomes(
    table: TrajectoryTable, reward: RewardConfig, max_response_length: int, moments: RunningMoments
) -> list[float]:
    """The outcome of every trajectory after the length penalty, the normalisation and the clip, in this order.

    Updates `moments` where the configuration normalises.
    """
    shaped = [
        outcome + overlong_penalty(response, reward.overlong_buffer, max_response_length)
        for outcome, response in zip(table.outcomes, table.responses, strict=True)
    ]
    if reward.running_normalization:
        moments.update(shaped)
        shaped = [(value - moments.mean) / moments.deviation for value in shaped]
    if reward.clip is not None:
        shaped = [min(max(value, -reward.clip), reward.clip) for value in shaped]
    return shaped


def shaping_metrics(shaped: list[float], reward: RewardConfig, moments: RunningMoments) -> dict[str, float]:
    """What became of the outcomes."""
    metrics = spread("reward/shaped", shaped)
    if reward.running_normalization:
        metrics |= {"reward/running_mean": moments.mean, "reward/running_std": moments.deviation}
    return metrics


def overlong_penalty(response: int, buffer: OverlongBufferConfig, max_response_length: int) -> float:
    """0 up to `max_response_length - len` tokens, then linearly down to `-penalty_factor` at the maximum."""
    if not buffer.len:
        return 0.0
    exceeding = response - (max_response_length - buffer.len)
    return min(-exceeding / buffer.len * buffer.penalty_factor, 0.0)


def add_to_outcomes(packed: PackedBatch, changes: list[float]) -> Tensor:
    """`[T]` rewards with the change of each trajectory (by place in the global batch) at its last action."""
    positions = torch.arange(len(packed), dtype=torch.double)
    last = packed.segments.max(positions, packed.mask).long()
    acts = packed.segments.lengths(packed.mask) > 0
    change = torch.tensor(changes, dtype=torch.double)[packed.indices]
    rewards = packed.rewards.double().index_add(0, last[acts], change[acts])
    return rewards.to(packed.rewards.dtype)


def without_truncated(packed: PackedBatch, truncated: list[bool]) -> Tensor:
    """`[T]` bool: the actions of answers that were not cut off."""
    cut = torch.tensor(truncated, dtype=torch.bool)[packed.indices]
    return packed.loss_mask & ~packed.segments.expand(cut)
