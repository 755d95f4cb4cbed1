"""Group-relative advantages: GRPO, 2402.03300; without the deviation, Dr. GRPO, 2503.20783."""

from dataclasses import dataclass

import torch

from mppo.algorithm.advantages.base import ESTIMATORS, AdvantageInputs, Advantages


@dataclass(frozen=True)
class GrpoConfig:
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO) or not (Dr. GRPO)."""


@ESTIMATORS.register("grpo", config=GrpoConfig, critic=False)
def grpo(x: AdvantageInputs, config: GrpoConfig) -> Advantages:
    """`(S_i - mean_group) / (std_group + 1e-6)`, one number per trajectory, the same for each of its actions.

    Only trajectories of which something trains count towards their group. A group of one keeps its
    raw score: mean 0, deviation 1.
    """
    scores = x.scores
    trains = (x.segments.lengths(x.training) > 0).double()
    size = x.per_group(trains)
    alone = (size <= 1)[x.groups]
    mean = (x.per_group(scores * trains) / size.clamp(min=1))[x.groups]
    centred = torch.where(alone, scores, scores - mean)
    if config.norm_adv_by_std_in_grpo:
        variance = x.per_group((centred * trains).square()) / (size - 1).clamp(min=1)
        deviation = variance.sqrt()[x.groups]
        centred = torch.where(alone, centred, centred / (deviation + 1e-6))
    advantages = x.segments.expand(centred).to(x.rewards.dtype) * x.training
    return Advantages(advantages, advantages)
