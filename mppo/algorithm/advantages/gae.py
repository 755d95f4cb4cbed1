"""Generalised advantage estimation, 1506.02438."""

from dataclasses import dataclass

import torch

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS, AdvantageInputs, Advantages
from mppo.algorithm.advantages.tokens import check_discount, discounted_suffix_sum, whiten


@dataclass(frozen=True)
class GaeConfig:
    gamma: float = 1.0
    """Discount per action."""
    lam: float = 1.0
    """The exponential weight of n-step returns: 0 is one-step TD, 1 is Monte Carlo."""

    def __post_init__(self):
        check_discount("gamma", self.gamma)
        check_discount("lam", self.lam)


@ESTIMATORS.register("gae", config=GaeConfig, critic=True)
def gae(x: AdvantageInputs, config: GaeConfig) -> Advantages:
    """`delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, then whitened over the batch.

    t+1 is the next *action* of the trajectory: what the mask hides (tool output, say) is stepped over.
    Returns are `A + V` before whitening.
    """
    actions = x.action_mask.bool().nonzero().squeeze(-1)
    all_values = x.need("values")
    ids, rewards, values = x.segments.ids[actions], x.rewards[actions], all_values[actions]

    next_values = torch.zeros_like(values)
    next_values[:-1] = torch.where(ids[1:] == ids[:-1], values[1:], 0.0)
    deltas = rewards + config.gamma * next_values - values
    advantages = discounted_suffix_sum(deltas, ids, config.gamma * config.lam)

    raw = torch.zeros_like(all_values).index_copy(0, actions, advantages)
    returns = torch.zeros_like(all_values).index_copy(0, actions, advantages + values)
    return Advantages(whiten(raw, x.loss_mask, x.reduction), returns)
