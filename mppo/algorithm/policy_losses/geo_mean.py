"""GMPO, 2507.20673: the geometric mean of the token ratios, clipped in log space, one loss per sequence."""

import torch
from torch import Tensor

from mppo.algorithm.policy_losses.clipping import ClipConfig
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic


@POLICY_LOSSES.register(
    "geo_mean", config=ClipConfig, loss_agg_mode="seq-mean-token-mean", applies_importance_weights=True
)
def geo_mean(x: PolicyInputs, config: ClipConfig) -> TokenLosses:
    """`-exp(mean_t m_t) mean_t A_t` for each token of a sequence, m the log-ratio with its pessimistic clip."""
    A, log_ratio, mean = x.advantages, x.log_ratio, x.segments.mean
    sign, clipped = A.sign(), log_ratio.clamp(-config.low, config.high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    loss = -mean(A, x.mask) * torch.exp(mean(pessimistic, x.mask))
    if x.rollout_is_weights is not None:
        loss = loss * geometric_mean(x.rollout_is_weights, x)

    differs = log_ratio != clipped
    return TokenLosses(
        x.segments.expand(loss),
        {
            "pg_clipfrac": TokenStatistic((differs & (A > 0)).float()),
            "pg_clipfrac_lower": TokenStatistic((differs & (A < 0)).float()),
            "ppo_kl": TokenStatistic(-log_ratio),
        },
    )


def geometric_mean(importance_weights: Tensor, x: PolicyInputs) -> Tensor:
    """`[T] -> [S]` over the positive weights of each trajectory; 0 where none is positive."""
    positive = x.mask & (importance_weights > 0)
    any_positive = x.segments.lengths(positive) > 0
    return torch.exp(x.segments.mean(importance_weights.log(), positive)) * any_positive
