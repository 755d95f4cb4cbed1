"""What an outcome is worth to the estimator: a penalty on length, normalisation over the run, a bound.

All of it follows from one number of each trajectory of the global batch, which every rank has, so every rank computes
the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.algorithm.statistics import Statistic, mean_and_extremes, numbers, std


@dataclass(frozen=True)
class OutcomeShaping:
    """How outcomes are shaped; as it stands, not at all."""

    max_response_length: int
    """Of actions."""
    overlong_buffer: int = 0
    """Actions before the maximum over which the penalty grows; 0: no penalty."""
    penalty_factor: float = 1.0
    """The penalty at the maximum."""
    normalise: bool = False
    """By mean and deviation of all outcomes of the run so far, this batch's included."""
    clip: float | None = None
    """The shaped outcome stays in [-clip, clip]."""


class RunningMoments:
    """Mean and deviation of all outcomes of a run. A step that is refused puts them back with `load_state_dict`."""

    def __init__(self):
        self._seen = _spread([])

    def update(self, values: Sequence[float]) -> None:
        """Add a batch."""
        self._seen = self._seen + _spread(values)

    @property
    def mean(self) -> float:
        return self._seen.mean.item()

    @property
    def deviation(self) -> float:
        """Unbiased; 1 while there is nothing to divide by."""
        deviation = self._seen.value
        return deviation if deviation > 1e-8 else 1.0

    def state_dict(self) -> dict[str, float]:
        seen = self._seen
        return {"count": seen.count.item(), "total": seen.total.item(), "squares": seen.squares_about(seen.mean).item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        moments = {name: torch.tensor(state[name], dtype=torch.double) for name in ("count", "total", "squares")}
        self._seen = Statistic(self._seen.number, **moments)


def _spread(values: Sequence[float]) -> Statistic:
    return std(*_all(values), unbiased=True)


def _all(values: Sequence[float]) -> tuple[Tensor, Tensor]:
    """As a vector, and a mask that hides nothing."""
    return torch.tensor(values, dtype=torch.double), torch.ones(len(values), dtype=torch.bool)


def shape_outcomes(
    outcomes: Sequence[float], action_counts: Sequence[int], shaping: OutcomeShaping, moments: RunningMoments
) -> list[float]:
    """The outcome of every trajectory after the length penalty, the normalisation and the clip, in this order.

    The length of a response is its number of actions: what a tool wrote is no fault of the policy. Updates `moments`
    where outcomes are normalised.
    """
    shaped = [
        outcome + overlong_penalty(actions, shaping) for outcome, actions in zip(outcomes, action_counts, strict=True)
    ]
    if shaping.normalise:
        moments.update(shaped)
        shaped = [(value - moments.mean) / moments.deviation for value in shaped]
    if shaping.clip is not None:
        shaped = [min(max(value, -shaping.clip), shaping.clip) for value in shaped]
    return shaped


def overlong_penalty(actions: int, shaping: OutcomeShaping) -> float:
    """0 up to `max_response_length - overlong_buffer` actions, then linearly down to `-penalty_factor` at the maximum.

    The soft punishment of DAPO, 2503.14476.
    """
    if not shaping.overlong_buffer:
        return 0.0
    exceeding = actions - (shaping.max_response_length - shaping.overlong_buffer)
    return min(-exceeding / shaping.overlong_buffer * shaping.penalty_factor, 0.0)


def shaping_metrics(shaped: Sequence[float], shaping: OutcomeShaping, moments: RunningMoments) -> dict[str, float]:
    """What became of the outcomes."""
    metrics = numbers(mean_and_extremes("reward/shaped", *_all(shaped)))
    if shaping.normalise:
        metrics |= {"reward/running_mean": moments.mean, "reward/running_std": moments.deviation}
    return metrics


def add_at_last_action(rewards: Tensor, changes: Tensor, action_mask: Tensor, segments: Segments) -> Tensor:
    """`rewards [T]` with `changes [S]` added, each at the last action of its trajectory, if it has any."""
    positions = torch.arange(len(rewards), dtype=torch.double, device=rewards.device)
    last = segments.max(positions, action_mask).long()
    acts = segments.lengths(action_mask) > 0
    return rewards.double().index_add(0, last[acts], changes.double()[acts]).to(rewards.dtype)


def without_trajectories(loss_mask: Tensor, dropped: Tensor, segments: Segments) -> Tensor:
    """`loss_mask [T]` less the trajectories `dropped [S]` bool, such as answers that were cut off."""
    return loss_mask & ~segments.expand(dropped)
