"""`d:` asks for digits, `l:` for letters: the quickest task to learn from random initialisation."""

import random
from dataclasses import dataclass
from typing import Any

from mppo.rollout.generators import GENERATORS
from mppo.rollout.rewards import REWARDS, Sample
from mppo.rollout.tasks.characters import characters


@dataclass(frozen=True)
class CharacterClassConfig:
    size: int = 4096
    """Prompts."""
    seed: int = 0
    """Of what is drawn."""


@GENERATORS.register("class", config=CharacterClassConfig)
def class_prompts(config: CharacterClassConfig) -> list[dict[str, Any]]:
    """Each prompt asks for one of the two classes."""
    draw = random.Random(config.seed)
    return [{"prompt": f"{c}:", "ground_truth": c} for c in (draw.choice("dl") for _ in range(config.size))]


@REWARDS.register("class")
def class_reward(sample: Sample) -> float:
    """Share of the model's tokens, each a character, that are of the class asked for."""
    belongs = str.isdigit if sample.ground_truth == "d" else str.isalpha
    return sum(belongs(c) for c in characters(sample.response)) / max(sample.action_count, 1)
