"""What an advantage estimator is given of the batch of a step."""

import torch

from mppo.algorithm.advantages import AdvantageInputs
from mppo.algorithm.reduction import Reduction
from mppo.trainer.batches import StepBatch

READS = ("rewards", "kept", "values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")


def estimator_inputs(batch: StepBatch, reduction: Reduction, device: torch.device) -> AdvantageInputs:
    """What an estimator sees of this rank's part, all of it on `device`. Raises DataError for a greedy answer that it
    needs and lacks."""
    packed, table = batch.packed.only(READS).to(device), batch.table
    baselines, groups = table.reward_baselines, table.groups
    return AdvantageInputs(
        rewards=packed["rewards"],
        action_mask=packed.mask,
        loss_mask=packed.loss_mask,
        segments=packed.segments,
        groups=batch.per_trajectory(groups).long().to(device),
        num_groups=max(groups) + 1,
        indices=packed.indices,
        num_trajectories=len(table),
        values=packed.get("values"),
        reduction=reduction,
        old_log_probs=packed.get("old_log_probs"),
        sum_pi_squared=packed.get("sum_pi_squared"),
        rollout_is_weights=packed.get("rollout_is_weights"),
        reward_baselines=None if baselines is None else batch.per_trajectory(baselines).to(device),
        reward_parts={name: batch.per_trajectory(numbers).to(device) for name, numbers in table.reward_parts.items()},
    )
