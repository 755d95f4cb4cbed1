"""What a reward function sees and what it may return, and reward functions by name.

Reward functions run in worker processes, so neither this module nor `mppo.rollout.tasks` imports torch.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mppo.config import RewardConfig
from mppo.errors import ConfigError
from mppo.registry import Registry, Traits, check_signature, typed


@dataclass(frozen=True)
class Sample:
    """One answer, as a reward function sees it."""

    prompt: str
    response: str
    """The text of the model's own tokens: without the prompt, without what tools or an environment wrote."""
    ground_truth: Any
    fields: dict[str, Any]
    """The row that the prompt came from."""
    token_ids: tuple[int, ...]
    """`[L]`: the trajectory, prompt included."""
    action_mask: tuple[bool, ...]
    """`[L]`: which of its tokens the model wrote."""
    prompt_number: int = 0
    """Number of the prompt in the run; it only grows, epoch after epoch."""

    @property
    def action_count(self) -> int:
        """Tokens that the model wrote."""
        return sum(self.action_mask)


@dataclass(frozen=True)
class Reward:
    """What a reward function may return instead of a number."""

    score: float
    accuracy: float | None = None
    """What validation reports; None: the score."""
    token_rewards: list[float] | None = None
    """`[L]`: one for each token of the trajectory, in addition to the score at the last action."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts, reported as metrics."""


@dataclass(frozen=True)
class RewardTraits(Traits):
    """How a reward function is to be called."""

    batch: bool = False
    """It takes the list of samples of one group and returns a list as long. For an import path: an attribute `batch`
    of the function."""
    packages: tuple[str, ...] = ()
    """What it imports when it is called, which worker processes then import before the first deadline runs."""


REWARDS: Registry[Callable, RewardTraits] = Registry("reward", traits=RewardTraits)
"""Reward functions by name. One takes a Sample and returns a number, a Reward, or a dictionary with `score`; it may be
`async`."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its options given, and how it is to be called."""

    name: str
    call: Callable
    """`(Sample)`, or `(list[Sample])` where `batch` is set."""
    batch: bool = False
    packages: tuple[str, ...] = ()

    @property
    def is_async(self) -> bool:
        function = inspect.unwrap(getattr(self.call, "func", self.call))  # of a partial: the function itself
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class Rewards:
    """Which function judges the answers to which prompts."""

    by_source: dict[str | None, RewardFunction]
    """By the data source that a prompt names; under None the one that judges all."""

    def of(self, source: str | None) -> RewardFunction:
        return self.by_source[source]


@dataclass
class SourceReward:
    """An entry of `reward.sources`."""

    function: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def rewards_of(config: RewardConfig) -> Rewards:
    """Raises ConfigError as `reward_function` does, and for an entry of `reward.sources` that is no reward."""
    if not config.sources:
        return Rewards({None: reward_function(config.function, config.options)})
    return Rewards({source: _of_source(source, given) for source, given in config.sources.items()})


def _of_source(source: str, given: Any) -> RewardFunction:
    where = f"reward.sources.{source}"
    if not isinstance(given, dict) or not given.get("function"):
        raise ConfigError(f"{where} is {given!r}; it must be {{function: NAME, options: {{...}}}}")
    entry = typed(SourceReward, given, where, "a data source's reward")
    return reward_function(entry.function, entry.options, where)


def reward_function(name: str, options: dict[str, Any], where: str = "reward") -> RewardFunction:
    """The reward of a registered name or an import path; `where` is its place in the configuration.

    Raises ConfigError for an unknown name, an option that it does not read, and a package that is missing.
    """
    plugin = REWARDS.get(name)
    for package in plugin.traits.packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{where}.function={name} needs the package {package.replace('_', '-')}; install it")
    batch = plugin.traits.batch or bool(getattr(plugin.fn, "batch", False))
    call = plugin.bind(options, f"{where}.options")
    check_signature(call, ("samples: list[Sample]" if batch else "sample: Sample",), f"reward {name!r}")
    return RewardFunction(name, call, batch, plugin.traits.packages)
