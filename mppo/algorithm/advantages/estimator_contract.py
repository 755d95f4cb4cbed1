"""What an advantage estimator is given and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.segments import Segments
from mppo.errors import ConfigError, DataError
from mppo.registry import Registry, Traits

BROUGHT_BY = {
    "values": "critic",
    "old_log_probs": "reads_old_policy",
    "sum_pi_squared": "sum_pi_squared",
    "reward_baselines": "greedy_baseline",
}
"""Optional fields of `AdvantageInputs`, and the trait of an estimator that brings them."""


@dataclass(frozen=True)
class AdvantageInputs:
    """This rank's part of the batch, packed, and the way to reduce over all parts."""

    rewards: Tensor
    """`[T]` token-level rewards, after shaping and any KL penalty."""
    action_mask: Tensor
    """`[T]` bool: positions that are actions; rewards stand there, also those of rejected actions."""
    loss_mask: Tensor
    """`[T]` bool: the actions whose losses count; group and batch statistics are over them."""
    segments: Segments
    groups: Tensor
    """`[S]` long: the prompt group of each trajectory, in `[0, num_groups)` over the *global* batch."""
    num_groups: int
    indices: Tensor
    """`[S]` long: each trajectory's index in the global batch, in `[0, num_trajectories)`."""
    num_trajectories: int
    values: Tensor | None = None
    """`[T]` the critic's predictions, for estimators registered with `critic=True`."""
    reduction: Reduction = WHOLE
    old_log_probs: Tensor | None = None
    """`[T]`: the PPO anchor."""
    sum_pi_squared: Tensor | None = None
    """`[T]` sum over the vocabulary of the squared probabilities of the anchor, for `sum_pi_squared=True`."""
    rollout_is_weights: Tensor | None = None
    """`[T]`: importance weights of the rollout correction, where it has them."""
    reward_baselines: Tensor | None = None
    """`[S]`: total reward of the greedy answer to the same prompt, for `greedy_baseline=True`."""
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """`[S]` each: the named parts that the reward function reported."""

    def need(self, name: str) -> Tensor:
        """The field of that name. Raises ConfigError where the estimator lacks the trait that brings it."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"an estimator that reads {name} must be registered with {BROUGHT_BY[name]}=True")
        return value

    @property
    def scores(self) -> Tensor:
        """`[S]`: the sum of all rewards of each trajectory, in float64."""
        return self.segments.sum(self.rewards.double(), torch.ones_like(self.action_mask))

    @property
    def trains(self) -> Tensor:
        """`[S]` float64: 1 for a trajectory of which something trains, 0 for the others."""
        return (self.segments.lengths(self.loss_mask) > 0).double()

    def per_group(self, x: Tensor) -> Tensor:
        """`[S] -> [num_groups]`: sum over the trajectories of each group of the global batch."""
        return self.reduction.sum(
            torch.zeros(self.num_groups, dtype=x.dtype, device=x.device).index_add(0, self.groups, x)
        )

    def everywhere(self, x: Tensor) -> Tensor:
        """`[S] -> [num_trajectories]`: a number of each trajectory of the global batch, by its index."""
        return self.reduction.sum(x.new_zeros(self.num_trajectories).index_copy(0, self.indices, x))

    def to_tokens(self, per_trajectory: Tensor) -> Tensor:
        """`[S] -> [T]`: one number for every action that trains, 0 elsewhere."""
        return self.segments.expand(per_trajectory).to(self.rewards.dtype) * self.loss_mask


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor
    """`[T]`, 0 where nothing trains."""
    returns: Tensor
    """`[T]`, the critic's target."""


def outcome(x: AdvantageInputs, per_trajectory: Tensor) -> Advantages:
    """The same advantage for each action of a trajectory; returns are the advantages."""
    advantages = x.to_tokens(per_trajectory)
    return Advantages(advantages, advantages)


@dataclass(frozen=True)
class EstimatorTraits(Traits):
    """What an estimator needs of a training step, beyond rewards and groups."""

    critic: bool = False
    """`values`: the run has a critic."""
    sum_pi_squared: bool = False
    """`sum_pi_squared`, which the old-log-prob pass then brings along."""
    greedy_baseline: bool = False
    """`reward_baselines`: every prompt is answered greedily once more."""
    groups: bool = False
    """It compares the answers to one prompt, so there should be several."""
    reads_rewards: bool = True
    """False: it reads only the parts of the reward, so shaping the whole would have no effect."""
    reads_old_policy: bool = False
    """It reads `old_log_probs`."""


ESTIMATORS: Registry[Callable[..., Advantages], EstimatorTraits] = Registry("advantage estimator", EstimatorTraits)
"""`(AdvantageInputs, config) -> Advantages`."""


@dataclass(frozen=True)
class Estimator:
    """A registered estimator with its knobs set, and what it needs."""

    name: str
    fn: Callable[[AdvantageInputs], Advantages]
    traits: EstimatorTraits = EstimatorTraits()
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward that every trajectory must have."""

    def __call__(self, x: AdvantageInputs) -> Advantages:
        """Raises ConfigError when the estimator does not return `Advantages` of one number per token."""
        result = self.fn(x)
        if not isinstance(result, Advantages):
            raise ConfigError(f"advantage estimator {self.name!r} returned a {type(result).__name__}, not Advantages")
        for name, value in vars(result).items():
            if value.shape != x.action_mask.shape:
                raise ConfigError(
                    f"advantage estimator {self.name!r} returned {name} of shape {list(value.shape)};"
                    f" one number per token is needed, {list(x.action_mask.shape)}"
                )
        return result

    def check_finite(self, result: Advantages, x: AdvantageInputs) -> None:
        """Raise DataError that names a trajectory of this rank whose advantages or returns are not finite."""
        for name, value in vars(result).items():
            non_finite = x.loss_mask & ~torch.isfinite(value)
            if bool(non_finite.any()):
                index = int(x.indices[x.segments.ids[non_finite][0]])
                raise DataError(
                    f"advantage estimator {self.name!r} returned {name} that are not finite, in trajectory {index}"
                )


def estimator(name: str, knobs: Mapping[str, Any] | None = None, where: str = "adv_options") -> Estimator:
    """The estimator of that name or import path, with these knobs; `where` is their place in the configuration.

    Raises ConfigError for an unknown name, and for a knob that the estimator does not read.
    """
    plugin = ESTIMATORS.get(name)
    config = plugin.configure(dict(knobs or {}), where)
    keys = tuple(getattr(config, "gdpo_reward_keys", ()))
    return Estimator(name, plugin.with_config(plugin.fn, config), plugin.traits, keys)
