"""Tasks: where each one's prompts come from, and what its answers are worth. Importing this package registers all."""

from mppo.rollout.generators import GENERATORS
from mppo.rollout.rewards import REWARDS, reward_function, rewards_of
from mppo.rollout.tasks import addition, character_class, general_rewards, offset, reasoning_gym

__all__ = [
    "GENERATORS",
    "REWARDS",
    "addition",
    "character_class",
    "general_rewards",
    "offset",
    "reasoning_gym",
    "reward_function",
    "rewards_of",
]
