"""Importance weights and rejection options by name. A user's own register alike."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mppo.algorithm.kl import LOG_RATIO_LIMIT
from mppo.algorithm.segments import Segments
from mppo.registry import Registry, Traits


@dataclass(frozen=True)
class ImportanceWeightTraits(Traits):
    """What a kind of importance weights declares."""

    per_sequence: bool = False
    """All tokens of a trajectory have the same weight."""


IMPORTANCE_WEIGHTS: Registry[Callable[[Tensor, Tensor, Segments], Tensor], ImportanceWeightTraits] = Registry(
    "importance weight", ImportanceWeightTraits
)
"""`(log_ratio [T], mask [T], segments) -> log-weights [T]`. The log-ratio is `log pi_train - log pi_rollout`."""


@dataclass(frozen=True)
class RejectionTraits(Traits):
    """What a rejection option declares."""

    per_sequence: bool = False
    """One divergence for each trajectory, which is kept or rejected whole."""
    log_ratio: bool = False
    """The divergence is a negated log-ratio, and its bounds are given as bounds of the ratio."""


REJECTIONS: Registry[Callable[[Tensor, Tensor, Segments], Tensor], RejectionTraits] = Registry(
    "rejection option", RejectionTraits
)
"""`(log_ratio [T] clamped to +-20, mask [T], segments) -> divergence [T]`, or `[S]` with `per_sequence=True`."""


@IMPORTANCE_WEIGHTS.register("token")
def token(log_ratio: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """`pi_train / pi_rollout` of the token alone."""
    return log_ratio


@IMPORTANCE_WEIGHTS.register("sequence", per_sequence=True)
def sequence(log_ratio: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """The product over the trajectory."""
    return segments.expand(segments.sum(log_ratio, mask))


def k1(log_ratio: Tensor) -> Tensor:
    """Estimates KL(rollout || train) without bias; one token may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square: never negative, biased."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Like k1 in expectation, and never negative."""
    return torch.expm1(log_ratio) - log_ratio


Divergence = Callable[[Tensor], Tensor]
OverTrajectory = Callable[[Segments, Tensor, Tensor], Tensor]


def of_tokens(divergence: Divergence, log_ratio: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """`[T]`: the divergence of each token."""
    return divergence(log_ratio)


def of_trajectories(
    divergence: Divergence, over: OverTrajectory, log_ratio: Tensor, mask: Tensor, segments: Segments
) -> Tensor:
    """`[S]`: the divergences of a trajectory's actions, taken together."""
    return over(segments, divergence(log_ratio), mask)


PER_TOKEN: dict[str, Divergence] = {"token_k1": k1, "token_k2": k2, "token_k3": k3}
PER_TRAJECTORY: dict[str, tuple[Divergence, OverTrajectory]] = {
    "seq_sum_k1": (k1, Segments.sum),
    "seq_sum_k2": (k2, Segments.sum),
    "seq_sum_k3": (k3, Segments.sum),
    "seq_mean_k1": (k1, Segments.mean),
    "seq_mean_k2": (k2, Segments.mean),
    "seq_mean_k3": (k3, Segments.mean),
    "seq_max_k2": (k2, Segments.max),  # of k1 the largest would bound one side only
    "seq_max_k3": (k3, Segments.max),
}
for _name, _divergence in PER_TOKEN.items():
    REJECTIONS.register(_name, log_ratio=_divergence is k1)(partial(of_tokens, _divergence))
for _name, (_divergence, _over) in PER_TRAJECTORY.items():
    REJECTIONS.register(_name, per_sequence=True, log_ratio=_divergence is k1)(
        partial(of_trajectories, _divergence, _over)
    )


def clamped(log_ratio: Tensor) -> Tensor:
    """To +-20, before anything exponentiates it."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
