"""GDPO, 2601.05242: each part of the reward is normalised within its group before the parts are added."""

from dataclasses import dataclass, field

import torch

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS, AdvantageInputs, Advantages
from mppo.algorithm.advantages.grpo import group_relative
from mppo.algorithm.advantages.tokens import whiten
from mppo.errors import ConfigError


@dataclass(frozen=True)
class GdpoConfig:
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Named parts of the reward, as the reward function reports them."""
    gdpo_reward_weights: list[float] | None = None
    """One for each key; null: all 1."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide each part by its group's standard deviation."""

    def __post_init__(self):
        where = "algorithm.adv_options"
        if not self.gdpo_reward_keys:
            raise ConfigError(f"{where}.gdpo_reward_keys is empty; name the parts that the reward function reports")
        if len(set(self.gdpo_reward_keys)) < len(self.gdpo_reward_keys):
            raise ConfigError(f"{where}.gdpo_reward_keys names a part twice: {', '.join(self.gdpo_reward_keys)}")
        weights = self.gdpo_reward_weights
        if weights is not None and len(weights) != len(self.gdpo_reward_keys):
            raise ConfigError(
                f"{where}.gdpo_reward_weights has {len(weights)} numbers for {len(self.gdpo_reward_keys)} keys"
            )


@ESTIMATORS.register("gdpo", config=GdpoConfig, groups=True, reads_rewards=False)
def gdpo(x: AdvantageInputs, config: GdpoConfig) -> Advantages:
    """`sum_k w_k GRPO(part k)`, whitened over the batch. The parts are read, not the total reward."""
    weights = config.gdpo_reward_weights or [1.0] * len(config.gdpo_reward_keys)
    summed = torch.zeros(x.segments.count, dtype=torch.double, device=x.rewards.device)
    for key, weight in zip(config.gdpo_reward_keys, weights, strict=True):
        summed += weight * group_relative(x, x.reward_parts[key].double(), config.norm_adv_by_std_in_grpo)
    advantages = whiten(x.to_tokens(summed), x.loss_mask, x.reduction)
    return Advantages(advantages, advantages)
