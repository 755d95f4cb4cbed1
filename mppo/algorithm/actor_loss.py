"""The actor's loss: policy term, entropy bonus and KL to the reference, as token losses (reference section 5)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.kl import FULL, kl_penalty, kl_saturated
from mppo.algorithm.policy_losses import PolicyInputs, PolicyLoss
from mppo.algorithm.statistics import Ratio


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
    weights: Tensor,
    terms: ActorTerms,
    entropy: Tensor | None = None,
    full_kl: Tensor | None = None,
) -> tuple[Tensor, dict[str, Ratio]]:
    """Token losses `[T]` and metrics without prefix.

    `weights [T]` are those of the aggregation mode, 0 outside the mask; they enter the metrics that are losses, not the
    token losses. `entropy` and `full_kl`, `[T]`, are given where the terms use them.
    Raises ConfigError when the policy loss returns anything but one loss per token.
    """
    mask = x.mask

    def total(token_values: Tensor) -> Ratio:
        return Ratio.total(torch.where(mask, token_values.detach(), 0.0) * weights)

    def weighted(term: str, token_values: Tensor) -> Tensor:
        return token_values if x.rollout_is_weights is None or term not in terms.importance_weighted else (
            token_values * x.rollout_is_weights
        )  # fmt: skip

    policy = terms.policy_loss(x)
    statistics = {name: statistic.reduce(mask) for name, statistic in policy.statistics.items()}
    statistics["pg_loss"] = total(policy.loss)
    loss = policy.loss
    if terms.uses_entropy:
        bonus = weighted("entropy", entropy)
        loss = loss - terms.entropy_coeff * bonus
        statistics["entropy_loss"] = total(bonus)
        statistics["entropy"] = Ratio.mean(entropy.detach(), mask)
    if terms.kl_loss_coef is not None:
        kl = full_kl if terms.uses_full_kl else kl_penalty(x.log_probs, x.ref_log_probs, terms.kl_loss_type)
        kl = weighted("kl", kl)
        loss = loss + terms.kl_loss_coef * kl
        statistics["kl_loss"] = total(kl)
        if not terms.uses_full_kl:
            saturated = kl_saturated(x.log_probs, x.ref_log_probs, terms.kl_loss_type)
            if saturated is not None:
                statistics["kl_saturated"] = Ratio.mean(saturated.float(), mask)
    statistics["loss"] = total(loss)
    return loss, statistics
