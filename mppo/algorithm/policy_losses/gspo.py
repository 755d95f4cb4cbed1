"""GSPO, 2507.18071, in its token form: one ratio per sequence, the geometric mean of the token ratios."""

import torch

from mppo.algorithm.policy_losses.clipping import ClipConfig
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic

LOG_WEIGHT_LIMIT = 10.0
"""The logarithm of the sequence ratio is clamped above at this."""


@POLICY_LOSSES.register("gspo", config=ClipConfig, loss_agg_mode="seq-mean-token-mean")
def gspo(x: PolicyInputs, config: ClipConfig) -> TokenLosses:
    """`-min(s A, clip(s, 1-low, 1+high) A)`; s has the value of the sequence ratio and the gradient of the token's."""
    A = x.advantages
    log_ratio = x.log_probs - x.old_log_probs
    sequence = x.segments.expand(x.segments.mean(log_ratio, x.mask))
    log_weight = x.log_probs - x.stop_gradient(x.log_probs) + x.stop_gradient(sequence)
    weight = torch.exp(log_weight.clamp(max=LOG_WEIGHT_LIMIT))
    unclipped = -A * weight
    clipped = -A * weight.clamp(1 - config.low, 1 + config.high)

    return TokenLosses(
        torch.maximum(unclipped, clipped),
        {
            "pg_clipfrac": TokenStatistic((clipped > unclipped).float()),
            "pg_clipfrac_lower": TokenStatistic(torch.zeros_like(A)),
            "ppo_kl": TokenStatistic(-log_ratio),
            "log_ratio_saturated": TokenStatistic((log_weight > LOG_WEIGHT_LIMIT).float()),
        },
    )
