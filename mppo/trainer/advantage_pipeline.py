"""From judged trajectories to advantages: rollout correction, shaping of outcomes, KL in the reward, the estimator."""

from dataclasses import dataclass

import torch

from mppo.algorithm.advantages.groups import groups_of_one
from mppo.algorithm.diagnostics import explained_variance
from mppo.algorithm.kl import KLController, kl_penalty
from mppo.algorithm.reduction import Reduction
from mppo.algorithm.reward_shaping import (
    RunningMoments,
    add_at_last_action,
    shape_outcomes,
    shaping_metrics,
    without_trajectories,
)
from mppo.algorithm.rollout_correction import CorrectionInputs, correct
from mppo.algorithm.statistics import mean, numbers, reduced
from mppo.megatron import platform
from mppo.megatron.collectives import fail_together
from mppo.trainer.batches import StepBatch
from mppo.trainer.estimator_inputs import estimator_inputs
from mppo.trainer.metrics import batch_statistics
from mppo.trainer.run_spec import Anchor, RunSpec


@dataclass(frozen=True)
class AdvantagePipeline:
    """What a step does between the forward-only passes and the updates. Collective over data-parallel ranks."""

    spec: RunSpec
    reduction: Reduction
    kl_controller: KLController
    moments: RunningMoments
    """Of all outcomes of the run."""
    metrics: dict[str, float]
    """Of the training step; what is found is added."""

    def __call__(self, batch: StepBatch) -> StepBatch:
        """The batch with `advantages` and `returns`. Raises DataError, on every rank, for any that is not finite."""
        batch = self._mask_truncated(batch)
        batch = self._correct(batch)
        batch = self._shape(batch)
        batch = self._penalise(batch)
        inputs = estimator_inputs(batch, self.reduction, platform.device())
        result = self.spec.estimator(inputs)
        with fail_together():
            self.spec.estimator.check_finite(result, inputs)
        batch = batch.with_fields(advantages=result.advantages.cpu(), returns=result.returns.cpu())
        self.metrics.update(numbers(reduced(batch_statistics(batch.packed), self.reduction)))
        if self.spec.estimator.traits.groups:
            self.metrics["advantage/groups_of_one"] = float(groups_of_one(inputs))
        if (values := batch.packed.get("values")) is not None:
            self.metrics["critic/explained_variance"] = explained_variance(
                values, batch.packed["returns"], batch.packed.loss_mask, self.reduction
            )
        return batch

    def _mask_truncated(self, batch: StepBatch) -> StepBatch:
        """By choice, answers that were cut off do not train."""
        if not self.spec.config.algorithm.overlong_masking:
            return batch
        packed, truncated = batch.packed, batch.per_trajectory(batch.table.truncated).bool()
        return batch.keeping(without_trajectories(packed.loss_mask, truncated, packed.segments), self.reduction)

    def _correct(self, batch: StepBatch) -> StepBatch:
        """Decoupled mode: importance weights and rejection by the anchor against the rollout's policy.

        In bypass mode that follows for each mini-batch, by the current policy.
        """
        correction, packed = self.spec.correction, batch.packed
        if self.spec.anchor(batch.table.prompt_count) is not Anchor.OWN_PASS:
            return batch
        inputs = CorrectionInputs(
            packed["old_log_probs"], packed["rollout_log_probs"], packed.loss_mask, packed.segments, self.reduction
        )
        result = correct(inputs, correction)
        self.metrics.update(result.metrics)
        if correction.rollout_rs is not None:
            batch = batch.keeping(result.kept, self.reduction)
        return batch.with_fields(rollout_is_weights=result.importance_weights)

    def _shape(self, batch: StepBatch) -> StepBatch:
        """Length penalty, normalisation and clip of the outcomes."""
        if not self.spec.config.reward.shapes:
            return batch
        shaping, table, packed = self.spec.outcome_shaping, batch.table, batch.packed
        shaped = shape_outcomes(table.outcomes, table.actions, shaping, self.moments)
        self.metrics.update(shaping_metrics(shaped, shaping, self.moments))
        changes = [after - before for after, before in zip(shaped, table.outcomes, strict=True)]
        of_mine = batch.per_trajectory(changes)
        return batch.with_fields(rewards=add_at_last_action(packed["rewards"], of_mine, packed.mask, packed.segments))

    def _penalise(self, batch: StepBatch) -> StepBatch:
        """Subtract `beta * KL(old, ref)` from each action's reward, then steer beta.

        The statistic is the mean over trajectories that train of their mean over actions.
        """
        if not self.spec.config.algorithm.use_kl_in_reward:
            return batch
        packed, beta = batch.packed, self.kl_controller.coefficient
        kl = packed.get("full_kl")
        if kl is None:
            form = self.spec.config.algorithm.kl_penalty
            kl = kl_penalty(packed["old_log_probs"], packed["ref_log_probs"], form)
        kl = torch.where(packed.mask, kl, 0.0)
        trains = packed.segments.lengths(packed.loss_mask) > 0
        statistic = mean(packed.segments.mean(kl.double(), packed.loss_mask), trains).reduced(self.reduction)
        self.metrics.update({"actor/reward_kl_penalty": statistic.value, "actor/reward_kl_penalty_coeff": beta})
        self.kl_controller.update(statistic.value, int(statistic.count))
        return batch.with_fields(rewards=packed["rewards"] - beta * kl)
