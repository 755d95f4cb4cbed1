"""Loss aggregation modes as token weights.

Every mode is linear in the token losses, so it is a vector `w[T]`; the loss of any piece of a batch is
`sum(w * token_loss)` and pieces add up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.registry import Registry


@dataclass(frozen=True)
class BatchCounts:
    """What the whole global mini-batch holds, known before its first forward pass."""

    loss_tokens: int
    """N: positions that the loss mask selects."""
    trajectories: int
    """B: trajectories with at least one such position."""


Aggregation = Callable[[Tensor, Segments, BatchCounts, float], Tensor]
"""`(mask [T], segments, counts, norm) -> token weights [T]`; `norm` is C of seq-mean-token-sum-norm."""

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation mode")


def token_weights(mode: str, mask: Tensor, segments: Segments, counts: BatchCounts, norm: float) -> Tensor:
    """The weight of each token loss, `[T]` float64, 0 outside the mask.

    `norm` (tokens) is the constant C of `seq-mean-token-sum-norm`: `loss_scale_factor`, or the configured
    maximum response length, never the width of a micro-batch. Raises ConfigError for an unknown mode.
    """
    return AGGREGATIONS.get(mode).fn(mask, segments, counts, norm)


@AGGREGATIONS.register("token-mean")
def token_mean(mask: Tensor, segments: Segments, counts: BatchCounts, norm: float) -> Tensor:
    """`1 / N`: every token of the mini-batch counts the same."""
    return mask.double() / max(counts.loss_tokens, 1)


@AGGREGATIONS.register("token-sum")
def token_sum(mask: Tensor, segments: Segments, counts: BatchCounts, norm: float) -> Tensor:
    """`1`: no mean at all; the scale grows with the tokens."""
    return mask.double()


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(mask: Tensor, segments: Segments, counts: BatchCounts, norm: float) -> Tensor:
    """`1 / B`."""
    return mask.double() / max(counts.trajectories, 1)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(mask: Tensor, segments: Segments, counts: BatchCounts, norm: float) -> Tensor:
    """`1 / (B n_i)`: every trajectory counts the same."""
    lengths = segments.lengths(mask).clamp(min=1).double()
    return mask.double() / (max(counts.trajectories, 1) * segments.expand(lengths))


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(mask: Tensor, segments: Segments, counts: BatchCounts, norm: float) -> Tensor:
    """`1 / (B C)` (Dr. GRPO, 2503.20783)."""
    return mask.double() / (max(counts.trajectories, 1) * norm)
