"""REINFORCE++, 2501.03262: whitened returns to go, no critic."""

from dataclasses import dataclass

import torch

from mppo.algorithm.advantages.base import ESTIMATORS, AdvantageInputs, Advantages, discounted_suffix_sum, whiten


@dataclass(frozen=True)
class ReinforcePlusPlusConfig:
    gamma: float = 1.0
    """Discount per action."""


@ESTIMATORS.register("reinforce_plus_plus", config=ReinforcePlusPlusConfig, critic=False)
def reinforce_plus_plus(x: AdvantageInputs, config: ReinforcePlusPlusConfig) -> Advantages:
    """`R_t = r_t + gamma R_{t+1}` over the actions of a trajectory, whitened over the batch; returns are `R`."""
    actions = x.mask.bool().nonzero().squeeze(-1)
    to_go = discounted_suffix_sum(x.rewards[actions], x.segments.ids[actions], config.gamma)
    returns = torch.zeros_like(x.rewards).index_copy(0, actions, to_go)
    return Advantages(whiten(returns, x.training, x.reduce_sum), returns)
