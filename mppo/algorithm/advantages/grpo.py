"""Group-relative advantages: GRPO, 2402.03300; without the deviation, Dr. GRPO, 2503.20783; for pass@k, 2503.19595."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS, AdvantageInputs, Advantages, outcome
from mppo.algorithm.advantages.groups import EPSILON, group_statistics, two_largest


@dataclass(frozen=True)
class GrpoConfig:
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO) or not (Dr. GRPO)."""


@ESTIMATORS.register("grpo", config=GrpoConfig, groups=True)
def grpo(x: AdvantageInputs, config: GrpoConfig) -> Advantages:
    """`(S_i - mean_group) / (std_group + 1e-6)`, one number per trajectory."""
    return outcome(x, group_relative(x, x.scores, config.norm_adv_by_std_in_grpo))


def group_relative(x: AdvantageInputs, scores: Tensor, by_std: bool) -> Tensor:
    """`[S]`: scores centred within their group, and by choice over its standard deviation."""
    group = group_statistics(x, scores)
    centred = scores - group.mean
    return centred / (group.std + EPSILON) if by_std else centred


@ESTIMATORS.register("grpo_passk", config=GrpoConfig, groups=True)
def grpo_passk(x: AdvantageInputs, config: GrpoConfig) -> Advantages:
    """Only the best answer of a group learns, by how far it is ahead: `(S_1 - S_2) / (std_group + 1e-6)`.

    Of equals the first in the batch is the best.
    """
    scores = x.scores
    leaders = two_largest(x, scores)
    group = group_statistics(x, scores)
    lead = torch.where(group.alone, scores, scores - leaders.second[x.groups])
    if config.norm_adv_by_std_in_grpo:
        lead = lead / (group.std + EPSILON)
    return outcome(x, torch.where(x.indices == leaders.index[x.groups], lead, 0.0))
