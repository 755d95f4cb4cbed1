"""Prompt generators by name. A generator returns rows, `{"prompt": ..., "ground_truth": ...}`."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mppo.errors import ConfigError
from mppo.registry import Registry

GENERATORS: Registry[Callable[..., list[dict[str, Any]]]] = Registry("prompt generator")


@dataclass(frozen=True)
class ReasoningGymConfig:
    dataset: str = "chain_sum"
    size: int = 1000
    seed: int = 0
    template: str = "{question}"
    """The prompt; `{question}` is replaced."""


@GENERATORS.register("reasoning_gym", config=ReasoningGymConfig)
def reasoning_gym(config: ReasoningGymConfig) -> list[dict[str, Any]]:
    """Tasks of the package reasoning-gym; the ground truth is its whole entry, for its own scorer."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise ConfigError("the generator reasoning_gym needs the package reasoning-gym") from error
    entries = create_dataset(config.dataset, size=config.size, seed=config.seed)
    return [{"prompt": config.template.format(question=e["question"]), "ground_truth": e} for e in entries]


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
def addition(config: AdditionConfig) -> list[dict[str, Any]]:
    """Sums of two digits."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    chosen = [(a, b) for a, b in pairs if ((a + 2 * b) % 5 == 0) == (config.split == "held_out")]
    return [{"prompt": f"{config.prefix}{a}+{b}=", "ground_truth": str(a + b)} for a, b in chosen]


@dataclass(frozen=True)
class TinyTaskConfig:
    size: int = 4096
    seed: int = 0


@GENERATORS.register("class", config=TinyTaskConfig)
def character_class(config: TinyTaskConfig) -> list[dict[str, Any]]:
    """`d:` asks for digits, `l:` for letters: the quickest task to learn from random initialisation."""
    draw = random.Random(config.seed)
    return [{"prompt": f"{c}:", "ground_truth": c} for c in (draw.choice("dl") for _ in range(config.size))]


@GENERATORS.register("offset", config=TinyTaskConfig)
def offset(config: TinyTaskConfig) -> list[dict[str, Any]]:
    """`b:ddd=`: copy the three digits. The reward is shifted by b/3: a critic can foresee it, a batch mean not."""
    draw = random.Random(config.seed)
    rows = []
    for _ in range(config.size):
        shift, digits = draw.randrange(10), "".join(draw.choice("0123456789") for _ in range(3))
        rows.append({"prompt": f"{shift}:{digits}=", "ground_truth": digits, "shift": shift})
    return rows
