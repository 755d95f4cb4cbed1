"""Tasks of the package reasoning-gym, with the package's own scorers."""

from dataclasses import dataclass
from typing import Any

from mppo.errors import ConfigError
from mppo.rollout.generators import GENERATORS
from mppo.rollout.rewards import REWARDS, Sample


@dataclass(frozen=True)
class ReasoningGymConfig:
    dataset: str = "chain_sum"
    """A data set of the package, by its name there."""
    size: int = 1000
    """Prompts."""
    seed: int = 0
    """Of what is drawn."""
    template: str = "{question}"
    """The prompt; `{question}` is replaced."""


@GENERATORS.register("reasoning_gym", config=ReasoningGymConfig)
def reasoning_gym_prompts(config: ReasoningGymConfig) -> list[dict[str, Any]]:
    """The ground truth is the package's whole entry, for its own scorer."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise ConfigError("the generator reasoning_gym needs the package reasoning-gym") from error
    entries = create_dataset(config.dataset, size=config.size, seed=config.seed)
    return [{"prompt": config.template.format(question=e["question"]), "ground_truth": e} for e in entries]


@REWARDS.register("reasoning_gym", packages=("reasoning_gym",))
def reasoning_gym_reward(sample: Sample) -> float:
    """The score of reasoning-gym's own scorer for the data set that the entry came from."""
    from reasoning_gym import get_score_answer_fn

    entry = sample.ground_truth
    return float(get_score_answer_fn(entry["metadata"]["source_dataset"])(sample.response.strip(), entry))
