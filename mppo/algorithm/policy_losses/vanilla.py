"""PPO's clipped surrogate: 1707.06347; dual clip 1912.09729; asymmetric clip 2503.14476 (DAPO)."""

from dataclasses import dataclass

import torch

from mppo.algorithm.policy_losses.clipping import ClipConfig
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError


@dataclass(frozen=True)
class VanillaConfig(ClipConfig):
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage the objective is never below C times the advantage. C > 1."""

    def __post_init__(self):
        super().__post_init__()
        if not self.clip_ratio_c > 1.0:
            raise ConfigError(f"actor.policy_loss.clip_ratio_c is {self.clip_ratio_c}; it must be greater than 1")


@POLICY_LOSSES.register("vanilla", config=VanillaConfig, loss_agg_mode="token-mean")
def vanilla(x: PolicyInputs, config: VanillaConfig) -> TokenLosses:
    """`-min(r A, clip(r, 1-low, 1+high) A)`, and for A < 0 at most `-C A`; r the probability ratio."""
    A, C = x.advantages, config.clip_ratio_c
    ratio = torch.exp(x.log_ratio)
    unclipped = -A * ratio
    clipped = -A * ratio.clamp(1 - config.low, 1 + config.high)
    pessimistic = torch.maximum(unclipped, clipped)
    loss = torch.where(A < 0, torch.minimum(pessimistic, -C * A), pessimistic)

    return TokenLosses(
        loss,
        {
            "pg_clipfrac": TokenStatistic((clipped > unclipped).float()),
            "pg_clipfrac_lower": TokenStatistic(((pessimistic > -C * A) & (A < 0)).float()),
            "ppo_kl": TokenStatistic(-x.log_ratio),
        },
    )
