"""DPPO, 2602.04879: a trust region on the divergence of the sampled token's probability, not on its ratio.

The ratio and the mask of what is kept carry no gradient; it flows through the log-prob alone, as in REINFORCE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.policy_losses.clipping import ClipConfig
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError


@dataclass(frozen=True)
class DppoConfig(ClipConfig):
    """Here the clip range bounds the divergence: a change of probability (tv) or a KL (kl)."""

    ratio_cap: float = 20.0
    """The detached ratio is never more than this."""

    def __post_init__(self):
        super().__post_init__()
        if not self.ratio_cap > 1.0:
            raise ConfigError(f"actor.policy_loss.ratio_cap is {self.ratio_cap}; it must be greater than 1")


@POLICY_LOSSES.register("dppo_tv", config=DppoConfig, loss_agg_mode="token-mean")
def dppo_tv(x: PolicyInputs, config: DppoConfig) -> TokenLosses:
    """`-A sg(min(r, cap)) log p`, kept while `p - q <= high` (A > 0) or `p - q >= -low` (otherwise)."""
    change = x.log_probs.exp() - x.old_log_probs.exp()
    keep = torch.where(x.advantages > 0, change <= config.high, change >= -config.low)
    return _trusted(x, config, keep)


@POLICY_LOSSES.register("dppo_kl", config=DppoConfig, loss_agg_mode="token-mean")
def dppo_kl(x: PolicyInputs, config: DppoConfig) -> TokenLosses:
    """The same with the KL of two Bernoulli variables, "this token or another": q against p.

    A token is let go only when it has moved too far in the direction that its advantage asks for.
    """
    log_p, log_q = x.log_probs, x.old_log_probs
    p, q = log_p.exp(), log_q.exp()
    kl = q * (log_q - log_p) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    keep = torch.where(x.advantages > 0, (kl <= config.high) | (p <= q), (kl <= config.low) | (p >= q))
    return _trusted(x, config, keep)


def _trusted(x: PolicyInputs, config: DppoConfig, keep: Tensor) -> TokenLosses:
    ratio = torch.exp(x.log_ratio)
    factor = x.stop_gradient(ratio.clamp(max=config.ratio_cap) * keep)
    return TokenLosses(
        -x.advantages * factor * x.log_probs,
        {
            "pg_clipfrac": TokenStatistic((~keep).float()),
            "pg_clipfrac_lower": TokenStatistic(((ratio > config.ratio_cap) & keep).float()),
            "ppo_kl": TokenStatistic(-x.log_ratio),
        },
    )
