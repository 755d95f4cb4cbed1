"""CISPO, 2506.13585 (MiniMax-M1): the ratio is clipped as a weight, so that no token loses its gradient."""

import torch

from mppo.algorithm.policy_losses.clipping import ClipConfig
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic


@POLICY_LOSSES.register("cispo", config=ClipConfig, loss_agg_mode="token-mean")
def cispo(x: PolicyInputs, config: ClipConfig) -> TokenLosses:
    """`-sg(clip(r, 1-low, 1+high)) A log p`"""
    ratio = torch.exp(x.log_ratio)
    clipped = ratio.clamp(1 - config.low, 1 + config.high)
    return TokenLosses(
        -x.stop_gradient(clipped) * x.advantages * x.log_probs,
        {
            "pg_clipfrac": TokenStatistic((ratio != clipped).float()),
            "pg_clipfrac_lower": TokenStatistic(torch.zeros_like(ratio)),
            "ppo_kl": TokenStatistic(-x.log_ratio),
        },
    )
