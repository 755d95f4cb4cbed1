"""Scores less a baseline of their own group: RLOO, OPO, GPG; and less the greedy answer's: ReMax."""

from dataclasses import dataclass

import torch

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS, AdvantageInputs, Advantages, outcome
from mppo.algorithm.advantages.groups import group_statistics
from mppo.algorithm.advantages.tokens import rewards_to_go
from mppo.algorithm.statistics import mean
from mppo.errors import ConfigError


@ESTIMATORS.register("rloo", groups=True)
def rloo(x: AdvantageInputs) -> Advantages:
    """2402.14740: the mean of the *other* answers as baseline, `n / (n - 1) (S_i - mean_group)`."""
    scores = x.scores
    group = group_statistics(x, scores)
    correction = torch.where(group.alone, 1.0, group.size / (group.size - 1))
    return outcome(x, correction * (scores - group.mean))


@ESTIMATORS.register("opo", groups=True)
def opo(x: AdvantageInputs) -> Advantages:
    """2505.23585: the mean of the group in proportion to length, `S_i - sum(len S) / sum(len)`."""
    scores, lengths = x.scores, x.segments.lengths(x.loss_mask).double()
    return outcome(x, scores - group_statistics(x, scores, shares=lengths).mean)


@dataclass(frozen=True)
class GpgConfig:
    f_norm: float = 1.0
    """Divides the advantages."""

    def __post_init__(self):
        if not self.f_norm > 0:
            raise ConfigError(f"algorithm.adv_options.f_norm is {self.f_norm}; it must be greater than 0")


@ESTIMATORS.register("gpg", config=GpgConfig, groups=True)
def gpg(x: AdvantageInputs, config: GpgConfig) -> Advantages:
    """2504.02546: `alpha (S_i - mean_group) / f_norm`, alpha = trajectories over those whose score is not zero."""
    scores = x.scores
    scored = mean(scores != 0, x.trains).reduced(x.reduction)
    alpha = (scored.count / scored.total.clamp(min=1)).item()
    return outcome(x, alpha * (scores - group_statistics(x, scores).mean) / config.f_norm)


@ESTIMATORS.register("remax", greedy_baseline=True)
def remax(x: AdvantageInputs) -> Advantages:
    """2310.10505: rewards to go less the reward of the greedy answer to the same prompt; returns are rewards to go."""
    returns = rewards_to_go(x.rewards, x.action_mask, x.segments.ids)
    baseline = x.segments.expand(x.need("reward_baselines")).to(returns.dtype)
    return Advantages((returns - baseline) * x.loss_mask, returns)
