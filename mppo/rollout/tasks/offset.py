"""`b:ddd=`: copy the three digits, for a reward that b shifts. A critic can foresee the shift, a batch mean cannot."""

import random
from dataclasses import dataclass
from typing import Any

from mppo.rollout.generators import GENERATORS
from mppo.rollout.rewards import REWARDS, Reward, Sample
from mppo.rollout.tasks.characters import characters


@dataclass(frozen=True)
class OffsetConfig:
    size: int = 4096
    """Prompts."""
    seed: int = 0
    """Of what is drawn."""


@GENERATORS.register("offset", config=OffsetConfig)
def offset_prompts(config: OffsetConfig) -> list[dict[str, Any]]:
    """The row's field `shift` is b."""
    draw = random.Random(config.seed)
    rows = []
    for _ in range(config.size):
        shift, digits = draw.randrange(10), "".join(draw.choice("0123456789") for _ in range(3))
        rows.append({"prompt": f"{shift}:{digits}=", "ground_truth": digits, "shift": shift})
    return rows


@REWARDS.register("offset")
def offset_reward(sample: Sample) -> Reward:
    """Share of digits copied right, plus a third of the prompt's shift; accurate when all are right."""
    wanted, given = sample.ground_truth, characters(sample.response)
    right = sum(given[i : i + 1] == digit for i, digit in enumerate(wanted)) / len(wanted)
    return Reward(right + sample.fields["shift"] / 3, accuracy=float(given == wanted))
