"""Sums of two digits, with a split into pairs that are trained on and pairs that are held out."""

from dataclasses import dataclass
from typing import Any

from mppo.errors import ConfigError
from mppo.rollout.generators import GENERATORS


@dataclass(frozen=True)
class AdditionConfig:
    split: str = "train"
    """`held_out`: the 20 pairs of digits with a + 2b divisible by 5, which hold every a and every b twice;
    `train`: the other 80."""
    prefix: str = "1+2=3\n5+4=9\n"
    """Worked examples before the question."""

    def __post_init__(self):
        if self.split not in ("train", "held_out"):
            raise ConfigError(f"addition: split is {self.split!r}; choose `train` or `held_out`")


@GENERATORS.register("addition", config=AdditionConfig)
def addition_prompts(config: AdditionConfig) -> list[dict[str, Any]]:
    """`a+b=`, after the worked examples. The reward `exact_match` of the first line goes with it."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    chosen = [(a, b) for a, b in pairs if ((a + 2 * b) % 5 == 0) == (config.split == "held_out")]
    return [{"prompt": f"{config.prefix}{a}+{b}=", "ground_truth": str(a + b)} for a, b in chosen]
