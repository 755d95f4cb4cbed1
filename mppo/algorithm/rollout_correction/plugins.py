"""Importance weights and rejection options by name. A user's own register alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.kl import LOG_RATIO_LIMIT
from mppo.algorithm.segments import Segments
from mppo.registry import Registry

IMPORTANCE_WEIGHTS: Registry[Callable[[Tensor, Tensor, Segments], Tensor]] = Registry(
    "importance weight", traits=("per_sequence",)
)
"""`(log_ratio [T], mask [T], segments) -> log-weights [T]`; register with `per_sequence=True` where all tokens of a
trajectory have the same. The log-ratio is `log pi_train - log pi_rollout`."""

REJECTIONS: Registry[Callable[[Tensor, Tensor, Segments], Tensor]] = Registry(
    "rejection option", traits=("per_sequence", "log_ratio")
)
"""`(log_ratio [T] clamped to +-20, mask [T], segments) -> divergence [T], or [S] with `per_sequence=True``. Register
with `log_ratio=True` where it is a (negated) log-ratio, whose bounds are given as bounds of the ratio."""


@IMPORTANCE_WEIGHTS.register("token")
def token(log_ratio: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """`pi_train / pi_rollout` of the token alone."""
    return log_ratio


@IMPORTANCE_WEIGHTS.register("sequence", per_sequence=True)
def sequence(log_ratio: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """The product over the trajectory."""
    return segments.expand(segments.sum(log_ratio, mask))


@dataclass(frozen=True)
class Rejection:
    """An option of `rollout_rs`."""

    fn: Callable[[Tensor, Tensor, Segments], Tensor]
    per_sequence: bool
    is_log_ratio: bool

    @classmethod
    def named(cls, name: str) -> "Rejection":
        """Raises ConfigError for an unknown name."""
        plugin = REJECTIONS.get(name)
        traits = plugin.traits or {}
        return cls(plugin.fn, traits.get("per_sequence", False), traits.get("log_ratio", False))


def k1(log_ratio: Tensor) -> Tensor:
    """Estimates KL(rollout || train) without bias; one token may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """Like k1 in expectation, and never negative."""
    return torch.expm1(log_ratio) - log_ratio


def _register_options() -> None:
    """token_k1 .. token_k3, seq_sum_*, seq_mean_*, and seq_max_k2, seq_max_k3: a largest k1 would bound one side."""

    def per_token(divergence):
        return lambda log_ratio, mask, segments: divergence(log_ratio)

    def per_sequence(divergence, over):
        return lambda log_ratio, mask, segments: getattr(segments, over)(divergence(log_ratio), mask)

    for divergence in (k1, k2, k3):
        name, is_log_ratio = divergence.__name__, divergence is k1
        REJECTIONS.register(f"token_{name}", log_ratio=is_log_ratio)(per_token(divergence))
        for over in ("sum", "mean", "max"):
            if (over, name) != ("max", "k1"):
                options = {"per_sequence": True, "log_ratio": is_log_ratio}
                REJECTIONS.register(f"seq_{over}_{name}", **options)(per_sequence(divergence, over))


_register_options()


def clamped(log_ratio: Tensor) -> Tensor:
    """To +-20, before anything exponentiates it."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
