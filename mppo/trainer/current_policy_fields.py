"""What an update of the actor must know of its whole mini-batch before the training pass.

Bypass mode corrects and rejects by the current policy against the rollout's; some losses choose tokens over the
mini-batch. Both see the current log-probs of all of it, whatever the cut.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mppo.algorithm.policy_losses import MiniBatchInputs, PolicyLoss
from mppo.algorithm.reduction import Reduction
from mppo.algorithm.rollout_correction import CorrectionInputs, correct
from mppo.algorithm.statistics import Statistics
from mppo.batch.packed import PREPARED, PackedBatch
from mppo.megatron.head import PolicyHead
from mppo.megatron.objectives import LogProbPass
from mppo.trainer.batches import StepBatch
from mppo.trainer.roles import TrainableRole
from mppo.trainer.run_spec import RunSpec


@dataclass(frozen=True)
class CurrentPolicyFields:
    """The fields of a mini-batch that follow from the policy about to be updated."""

    spec: RunSpec
    actor: TrainableRole
    head: PolicyHead
    reduction: Reduction

    @property
    def corrects(self) -> bool:
        """Whether importance weights or rejection follow from the current policy."""
        correction = self.spec.correction
        return correction.bypass_mode and (correction.rollout_is is not None or correction.rollout_rs is not None)

    @property
    def is_needed(self) -> bool:
        """Whether a mini-batch must be looked at under the weights that it is about to update."""
        return self.corrects or self.spec.policy_loss.needs_mini_batch

    def add(self, batch: StepBatch, indices: list[int], number: int) -> tuple[StepBatch, Statistics]:
        """The batch with what the mini-batch `indices` needs, and the statistics of its correction.

        It is the `number`th of the training step. Costs a forward pass over it, unless nothing is needed, or the anchor
        is the current policy.
        """
        if not self.is_needed:
            return batch, {}
        log_probs = self._current_log_probs(batch, indices, number)
        statistics: Statistics = {}
        if self.corrects:
            batch, statistics = self._correct(batch, indices, log_probs)
        if self.spec.policy_loss.needs_mini_batch:
            batch = self._run_prepare(batch, indices, log_probs, number)
        return batch, statistics

    def _current_log_probs(self, batch: StepBatch, indices: list[int], number: int) -> Tensor:
        """`[T]`. Before the first update of a step they are those of the anchor, which need no pass."""
        if number == 0 and not self.spec.correction.bypass_mode:
            return batch.packed["old_log_probs"]
        limit = self.spec.actor.infer_limit
        return self.actor.forward(batch, limit, LogProbPass(self.head), indices)["log_probs"]

    def _correct(self, batch: StepBatch, indices: list[int], log_probs: Tensor) -> tuple[StepBatch, Statistics]:
        part = _part(batch, indices)
        inputs = CorrectionInputs(
            log_probs=log_probs[part.origin],
            rollout_log_probs=part["rollout_log_probs"],
            mask=part.loss_mask,
            segments=part.segments,
            reduction=self.reduction,
        )
        correction = correct(inputs, self.spec.correction)
        if correction.importance_weights is not None:
            batch = batch.with_fields(rollout_is_weights=_put_back(batch, part, correction.importance_weights))
        kept = batch.packed.loss_mask.clone()
        kept[part.origin] = correction.kept
        return batch.keeping(kept, self.reduction), correction.statistics

    def _run_prepare(self, batch: StepBatch, indices: list[int], log_probs: Tensor, number: int) -> StepBatch:
        seed = random.Random(f"{self.spec.config.trainer.seed}/{batch.step}/{number}").getrandbits(60)
        return with_prepared(self.spec.policy_loss, batch, indices, log_probs, seed, self.reduction)


def with_prepared(
    loss: PolicyLoss, batch: StepBatch, indices: list[int], log_probs: Tensor, seed: int, reduction: Reduction
) -> StepBatch:
    """The batch with what the `prepare` of the loss finds in the mini-batch `indices`.

    `log_probs [T]` are those of the policy about to be updated. Collective over data-parallel ranks.
    """
    part, lengths = _part(batch, indices), batch.table.lengths
    ends = accumulate(lengths[i] for i in indices)
    starts = {index: end - lengths[index] for index, end in zip(indices, ends, strict=True)}
    start = torch.tensor([starts[i] for i in part.indices.tolist()], dtype=torch.long)
    inputs = MiniBatchInputs(
        log_probs=log_probs[part.origin],
        old_log_probs=part["old_log_probs"],
        advantages=part["advantages"],
        mask=part.loss_mask,
        segments=part.segments,
        batch_positions=part.segments.expand(start) + part.positions,
        seed=seed,
        reduction=reduction,
    )
    prepared = loss.prepare(inputs)
    return batch.with_fields({f"{PREPARED}/{name}": _put_back(batch, part, x) for name, x in prepared.items()})


def _part(batch: StepBatch, indices: list[int]) -> PackedBatch:
    """This rank's trajectories of the mini-batch."""
    return batch.packed.select([batch.row_of[i] for i in indices if i in batch.row_of])


def _put_back(batch: StepBatch, part: PackedBatch, values: Tensor) -> Tensor:
    """`[T]` of the whole rank, 0 outside the part."""
    whole = values.new_zeros(len(batch.packed))
    whole[part.origin] = values
    return whole
