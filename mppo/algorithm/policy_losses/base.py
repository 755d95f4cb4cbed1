"""What a policy loss is given and what it returns."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from mppo.algorithm.kl import LOG_RATIO_LIMIT
from mppo.algorithm.segments import Segments
from mppo.algorithm.statistics import TokenStatistic
from mppo.registry import Registry


@dataclass(frozen=True)
class PolicyInputs:
    """Packed `[T]` vectors; index t is about the action that produced token t+1."""

    log_probs: Tensor
    """Current policy; the only one with a gradient."""
    old_log_probs: Tensor
    """The PPO anchor."""
    advantages: Tensor
    mask: Tensor
    """Which positions are actions that train. Values outside it are arbitrary."""
    segments: Segments

    @property
    def log_ratio(self) -> Tensor:
        """`log pi - log pi_old`, clamped to +-20 before anything exponentiates it; zero gradient beyond."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class TokenLosses:
    """Token losses and the metrics of a loss."""

    loss: Tensor
    """`[T]`, to be minimised; not masked, not averaged."""
    statistics: dict[str, TokenStatistic] = field(default_factory=dict)


def anchor_statistics(x: PolicyInputs) -> dict[str, TokenStatistic]:
    """How far the current policy is from the anchor, reported with every loss."""
    saturated = (x.log_probs - x.old_log_probs).abs() > LOG_RATIO_LIMIT
    return {
        "ratio_deviation": TokenStatistic((x.log_ratio.exp() - 1).abs()),
        "log_ratio_saturated": TokenStatistic(saturated.float()),
    }


PolicyLoss = Callable[[PolicyInputs, object], TokenLosses]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")
"""Register with `config=` (dataclass of knobs) and `loss_agg_mode=` (the paper's aggregation mode)."""
