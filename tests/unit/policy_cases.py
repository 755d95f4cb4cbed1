"""Every policy loss with knobs that bring out what it does, and mini-batches to give to it."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.policy_losses import POLICY_LOSSES, MiniBatchInputs, PolicyInputs, PolicyLoss, policy_loss
from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.statistics import Statistics
from mppo.batch.packed import PREPARED, PackedBatch
from tests.unit.samples import masked_sum, normals, packed_batches, segments_of

KNOBS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
    "bypass_mode/reinforce": {"loss_type": "reinforce"},
}
CASES = [*POLICY_LOSSES.names(), "bypass_mode/reinforce"]


def loss_of(case: str) -> PolicyLoss:
    return policy_loss(case.partition("/")[0], KNOBS.get(case))


def counts_of(batch: PackedBatch) -> BatchCounts:
    return BatchCounts(int(batch.mask.sum()), int((batch.segments.lengths(batch.mask) > 0).sum()))


@st.composite
def mini_batches(draw, **sizes: int) -> tuple[PackedBatch, Tensor]:
    """A batch with anchor, advantages and importance weights, and the log-probs `[T]` of the current policy."""
    batch = draw(packed_batches(**sizes))
    old, change, advantages, weights = draw(normals(4, len(batch)))
    old_log_probs = -0.1 - old.abs()
    with_fields = batch.with_fields(
        old_log_probs=old_log_probs, advantages=advantages, rollout_is_weights=weights.exp()
    )
    return with_fields, old_log_probs + 0.4 * change


def prepared(
    loss: PolicyLoss,
    batch: PackedBatch,
    log_probs: Tensor,
    places: Tensor | None = None,
    seed: int = 7,
    reduction: Reduction = WHOLE,
) -> PackedBatch:
    """The batch with what the loss prepares, from this rank's part of it."""
    if not loss.needs_mini_batch:
        return batch
    mini_batch = MiniBatchInputs(
        log_probs=log_probs,
        old_log_probs=batch["old_log_probs"],
        advantages=batch["advantages"],
        mask=batch.mask,
        segments=batch.segments,
        batch_positions=torch.arange(len(batch)) if places is None else places,
        seed=seed,
        reduction=reduction,
    )
    return batch.with_fields({f"{PREPARED}/{name}": x for name, x in loss.prepare(mini_batch).items()})


def policy_inputs(batch: PackedBatch, log_probs: Tensor, **others: Any) -> PolicyInputs:
    weights = batch.get("rollout_is_weights")
    given = {"segments": batch.segments, "rollout_is_weights": weights, "prepared": batch.prepared}
    return PolicyInputs(log_probs, batch["old_log_probs"], batch["advantages"], batch.mask, **{**given, **others})


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Weighed by the loss's own aggregation mode."""
    gradient: Tensor
    """`[T]`"""
    statistics: Statistics

    @property
    def numbers(self) -> dict[str, float]:
        return {name: ratio.value for name, ratio in self.statistics.items()}


def evaluate(
    loss: PolicyLoss, batch: PackedBatch, log_probs: Tensor, counts: BatchCounts | None = None, **others: Any
) -> Evaluation:
    """What a prepared batch contributes to a mini-batch of these counts (its own, unless given)."""
    log_probs = log_probs.detach().clone().requires_grad_()
    x = policy_inputs(batch, log_probs, **others)
    weights = token_weights(loss.loss_agg_mode, x.mask, x.segments, counts or counts_of(batch), norm=16.0)
    result = loss(x)
    total = masked_sum(result.loss, x.mask, weights)
    (gradient,) = torch.autograd.grad(total, log_probs)
    return Evaluation(total.item(), gradient, {name: s.reduce(x.mask) for name, s in result.statistics.items()})


def tokens(log_ratios: list[float], advantages: list[float], old: float = -1.2, **others: Any) -> PolicyInputs:
    """One trajectory of these tokens, whose log-prob was `old` under the anchor."""
    old_log_probs = torch.full((len(log_ratios),), old, dtype=torch.double)
    log_probs = (old_log_probs + torch.tensor(log_ratios, dtype=torch.double)).requires_grad_()
    mask, segments = torch.ones(len(log_ratios), dtype=torch.bool), segments_of(len(log_ratios))
    advantages = torch.tensor(advantages, dtype=torch.double)
    return PolicyInputs(log_probs, old_log_probs, advantages, mask, segments, **others)


def losses_and_gradient(loss: PolicyLoss, x: PolicyInputs) -> tuple[list[float], list[float]]:
    """Of each token, and of the sum of all by each log-prob."""
    result = loss(x).loss
    (gradient,) = torch.autograd.grad(result.sum(), x.log_probs)
    return result.tolist(), gradient.tolist()
