"""An estimator run once on a small batch, before anything is launched: what it takes, reads and returns."""

import inspect
from typing import Any

import torch

from mppo.algorithm.advantages.estimator_contract import (
    BROUGHT_BY,
    AdvantageInputs,
    Estimator,
    EstimatorTraits,
)
from mppo.algorithm.segments import Segments
from mppo.errors import ConfigError

SIGNATURE = "(x: AdvantageInputs) -> Advantages, or with knobs (x: AdvantageInputs, config: ItsConfig) -> Advantages"
GROUPS = ("groups", "num_groups")


class RecordedInputs(AdvantageInputs):
    """Inputs that remember which of their fields were read."""

    def __getattribute__(self, name: str) -> Any:
        if name in AdvantageInputs.__dataclass_fields__:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return object.__getattribute__(self, name)

    @property
    def read(self) -> set[str]:
        return self.__dict__.get("_read", set())


def probe_estimator(estimator: Estimator) -> None:
    """Raises ConfigError for a wrong signature, for what it raises, for a result that is not `Advantages` of finite
    numbers for every token, and for a field that it reads without having declared the trait that brings it."""
    try:
        inspect.signature(estimator.fn).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"advantage estimator {estimator.name!r} cannot be called with the inputs alone ({error}); its signature"
            f" must be {SIGNATURE}"
        ) from error
    inputs = _inputs(estimator)
    try:
        result = estimator(inputs)
    except ConfigError:
        raise
    except Exception as error:
        _refuse_undeclared(estimator, inputs.read)  # which is the likely cause
        raised = f"{type(error).__name__}: {error}"
        raise ConfigError(f"advantage estimator {estimator.name!r} raised on a small batch: {raised}") from error
    _refuse_undeclared(estimator, inputs.read)
    for name, value in vars(result).items():
        if not value.is_floating_point() or not bool(torch.isfinite(value[inputs.loss_mask]).all()):
            raise ConfigError(
                f"advantage estimator {estimator.name!r} returned {name} of {value.dtype} that are no finite numbers on"
                " a small batch of ordinary rewards"
            )


def _refuse_undeclared(estimator: Estimator, read: set[str]) -> None:
    if read.intersection(GROUPS) and not estimator.traits.groups:
        _refuse(estimator, "groups", "groups=True")
    for name, trait in BROUGHT_BY.items():
        if name in read and not getattr(estimator.traits, trait):
            _refuse(estimator, name, f"{trait}=True")


def _refuse(estimator: Estimator, name: str, trait: str) -> None:
    raise ConfigError(
        f"advantage estimator {estimator.name!r} reads {name} and did not say so: register it with {trait}, as"
        f' @ESTIMATORS.register("name", {trait})'
    )


def _inputs(estimator: Estimator) -> RecordedInputs:
    """Six trajectories of one to five tokens in three groups, one token of each longer one masked; what a trait brings
    is there, all else is None."""
    traits: EstimatorTraits = estimator.traits
    lengths = torch.tensor([3, 1, 5, 2, 4, 3])
    count = int(lengths.sum())
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(6), lengths)
    mask = torch.ones(count, dtype=torch.bool)
    last = lengths.cumsum(0) - 1
    rewards = torch.zeros(count)
    rewards[last] = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 2.0])
    drawn = torch.rand(count, generator=generator)
    loss_mask = mask.clone()
    loss_mask[last[lengths > 2] - 1] = False
    return RecordedInputs(
        rewards=rewards,
        action_mask=mask,
        loss_mask=loss_mask,
        segments=Segments(ids, 6),
        groups=torch.tensor([0, 0, 1, 1, 2, 2]),
        num_groups=3,
        indices=torch.arange(6),
        num_trajectories=6,
        values=drawn if traits.critic else None,
        old_log_probs=-drawn if traits.reads_old_policy else None,
        sum_pi_squared=drawn.square() if traits.sum_pi_squared else None,
        reward_baselines=torch.full((6,), 0.5, dtype=torch.double) if traits.greedy_baseline else None,
        reward_parts={key: torch.arange(6, dtype=torch.double) for key in estimator.reward_keys},
    )
