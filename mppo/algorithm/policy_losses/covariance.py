"""Clip-Cov and KL-Cov, 2505.22617: hold back the few tokens whose log-prob and advantage covary most.

Which tokens is decided over the global mini-batch, before its training pass, so it does not depend on the cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.policy_losses.clipping import ClipConfig
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.policy_losses.mini_batch import MiniBatchInputs
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError


@dataclass(frozen=True)
class ClipCovConfig(ClipConfig):
    clip_cov_ratio: float = 2e-4
    """Share of the mini-batch's tokens that lose their gradient; at least one does."""
    clip_cov_lb: float = 1.0
    """Only tokens whose covariance lies strictly above it may be chosen,"""
    clip_cov_ub: float = 5.0
    """and strictly below this."""

    def __post_init__(self):
        super().__post_init__()
        _check_share("clip_cov_ratio", self.clip_cov_ratio)
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ConfigError(
                f"actor.policy_loss.clip_cov_lb={self.clip_cov_lb} is not below clip_cov_ub={self.clip_cov_ub}"
            )


@dataclass(frozen=True)
class KlCovConfig:
    kl_cov_ratio: float = 2e-4
    """Share of the mini-batch's tokens that are held by the penalty; at least one is."""
    ppo_kl_coef: float = 0.1
    """Strength of the penalty."""

    def __post_init__(self):
        _check_share("kl_cov_ratio", self.kl_cov_ratio)
        if not self.ppo_kl_coef >= 0:
            raise ConfigError(f"actor.policy_loss.ppo_kl_coef is {self.ppo_kl_coef}; it must not be negative")


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"actor.policy_loss.{name} is {value}; it must be in (0, 1]")


def covariance(x: MiniBatchInputs) -> Tensor:
    """`[T]`: each token's term of the covariance of advantage and log-prob over the mini-batch."""
    return (x.advantages - x.mean(x.advantages)) * (x.log_probs - x.mean(x.log_probs))


def choose_to_clip(x: MiniBatchInputs, config: ClipCovConfig) -> dict[str, Tensor]:
    """`covers [T]`: drawn at random from the tokens in the band that PPO's own clip has not silenced already."""
    A = x.advantages
    ratio = PolicyInputs(x.log_probs, x.old_log_probs, A, x.mask, x.segments).log_ratio.exp()
    is_clipped = -A * ratio.clamp(1 - config.low, 1 + config.high) > -A * ratio
    cov = covariance(x)
    candidates = x.mask & ~is_clipped & (cov > config.clip_cov_lb) & (cov < config.clip_cov_ub)
    count = max(int(config.clip_cov_ratio * x.loss_tokens), 1)
    return {"covers": x.choose(x.random(), candidates, count)}


def choose_to_hold(x: MiniBatchInputs, config: KlCovConfig) -> dict[str, Tensor]:
    """`covers [T]`: the tokens of the highest covariance."""
    count = max(int(config.kl_cov_ratio * x.loss_tokens), 1)
    return {"covers": x.choose(covariance(x), x.mask, count)}


@POLICY_LOSSES.register("clip_cov", config=ClipCovConfig, loss_agg_mode="token-mean", prepare=choose_to_clip)
def clip_cov(x: PolicyInputs, config: ClipCovConfig) -> TokenLosses:
    """`max(-r A, -clip(r) A)`, and 0 for the chosen."""
    A, chosen = x.advantages, x.prepared["covers"]
    ratio = torch.exp(x.log_ratio)
    loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - config.low, 1 + config.high))
    return TokenLosses(
        torch.where(chosen, 0.0, loss),
        {"pg_clipfrac": TokenStatistic(chosen.float()), "ppo_kl": TokenStatistic(-x.log_ratio)},
    )


@POLICY_LOSSES.register("kl_cov", config=KlCovConfig, loss_agg_mode="token-mean", prepare=choose_to_hold)
def kl_cov(x: PolicyInputs, config: KlCovConfig) -> TokenLosses:
    """`-r A`, and for the chosen a penalty `coef |log r|`; nothing is clipped."""
    distance = (x.log_probs - x.old_log_probs).abs()
    penalty = torch.where(x.prepared["covers"], config.ppo_kl_coef * distance, 0.0)
    return TokenLosses(-x.advantages * torch.exp(x.log_ratio) + penalty, {"ppo_kl": TokenStatistic(distance)})
