"""The actor's loss: policy term, entropy bonus and KL to the reference, as token losses.

Importance weights and token weights enter here and nowhere else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.kl import FULL, kl_penalty, kl_saturated
from mppo.algorithm.policy_losses import PolicyInputs, PolicyLoss
from mppo.algorithm.statistics import Statistic, Statistics, mean, total
from mppo.errors import ConfigError


@dataclass(frozen=True)
class ActorTerms:
    """What the actor minimises: `L = L_PG - entropy_coeff * H + kl_loss_coef * KL_ref`."""

    policy_loss: PolicyLoss
    entropy_coeff: float = 0.0
    report_entropy: bool = False
    """Report entropy even when its coefficient is 0."""
    kl_loss_coef: float | None = None
    """None: no loss-side KL."""
    kl_loss_type: str = "low_var_kl"
    importance_weighted: tuple[str, ...] = ("policy",)
    """The terms that importance weights multiply: `policy`, and by choice `kl` and `entropy`."""

    @property
    def uses_entropy(self) -> bool:
        return bool(self.entropy_coeff) or self.report_entropy

    @property
    def uses_full_kl(self) -> bool:
        return self.kl_loss_coef is not None and self.kl_loss_type == FULL


def actor_loss(
    x: PolicyInputs,
    token_weights: Tensor,
    terms: ActorTerms,
    entropy: Tensor | None = None,
    full_kl: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Token losses `[T]` and metrics without prefix.

    `token_weights [T]` are those of the aggregation mode, 0 outside the mask; they enter the metrics that are losses,
    not the token losses. `entropy` and `full_kl`, `[T]`, are given where the terms use them.
    Raises ConfigError when the policy loss returns anything but one loss per token.
    """
    mask = x.mask

    def aggregated(token_values: Tensor) -> Statistic:
        return total(torch.where(mask, token_values.detach(), 0.0) * token_weights)

    def importance_weighted(term: str, token_values: Tensor) -> Tensor:
        if x.rollout_is_weights is None or term not in terms.importance_weighted:
            return token_values
        return token_values * x.rollout_is_weights

    policy = terms.policy_loss(x)
    statistics = {name: statistic.reduce(mask) for name, statistic in policy.statistics.items()}
    loss = policy.loss
    if not terms.policy_loss.traits.applies_importance_weights:
        loss = importance_weighted("policy", loss)
    statistics["pg_loss"] = aggregated(loss)
    if terms.uses_entropy:
        entropy = _given(entropy, "the entropy")
        bonus = importance_weighted("entropy", entropy)
        loss = loss - terms.entropy_coeff * bonus
        statistics["entropy_loss"] = aggregated(bonus)
        statistics["entropy"] = mean(entropy, mask)
    if terms.kl_loss_coef is not None:
        if terms.uses_full_kl:
            kl = _given(full_kl, "the exact KL")
        else:
            kl = kl_penalty(x.log_probs, _given(x.ref_log_probs, "ref_log_probs"), terms.kl_loss_type)
        kl = importance_weighted("kl", kl)
        loss = loss + terms.kl_loss_coef * kl
        statistics["kl_loss"] = aggregated(kl)
        if not terms.uses_full_kl:
            saturated = kl_saturated(x.log_probs, _given(x.ref_log_probs, "ref_log_probs"), terms.kl_loss_type)
            if saturated is not None:
                statistics["kl_saturated"] = mean(saturated, mask)
    statistics["loss"] = aggregated(loss)
    return loss, statistics


def _given(x: Tensor | None, name: str) -> Tensor:
    if x is None:
        raise ConfigError(f"the actor's loss has a term of {name}, which is not given")
    return x
