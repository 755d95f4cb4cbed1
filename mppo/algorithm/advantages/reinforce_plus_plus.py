"""REINFORCE++, 2501.03262: whitened returns to go, no critic; and its variant with the group's mean as baseline."""

from dataclasses import dataclass

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS, AdvantageInputs, Advantages
from mppo.algorithm.advantages.groups import group_statistics
from mppo.algorithm.advantages.tokens import check_discount, rewards_to_go, whiten


@dataclass(frozen=True)
class ReinforcePlusPlusConfig:
    gamma: float = 1.0
    """Discount per action."""

    def __post_init__(self):
        check_discount("gamma", self.gamma)


@ESTIMATORS.register("reinforce_plus_plus", config=ReinforcePlusPlusConfig)
def reinforce_plus_plus(x: AdvantageInputs, config: ReinforcePlusPlusConfig) -> Advantages:
    """`R_t = r_t + gamma R_{t+1}` over the actions of a trajectory, whitened over the batch; returns are `R`."""
    returns = rewards_to_go(x.rewards, x.action_mask, x.segments.ids, config.gamma)
    return Advantages(whiten(returns, x.loss_mask, x.reduction), returns)


@ESTIMATORS.register("reinforce_plus_plus_baseline", groups=True)
def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Advantages:
    """`S_i - mean_group` for each action, whitened over the batch."""
    scores = x.scores
    centred = scores - group_statistics(x, scores).mean
    advantages = whiten(x.to_tokens(centred), x.loss_mask, x.reduction)
    return Advantages(advantages, advantages)
