"""Statistics over the answers to one prompt. One rule for all estimators that compare them:

- only trajectories of which something trains count towards their group;
- a group that is left with one such trajectory has nothing to compare with: mean 0, standard deviation 1, so that the
  advantage is the raw score. `advantage/groups_of_one` counts them, and a run warns when there are any.

Groups may differ in size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.advantages.estimator_contract import AdvantageInputs

EPSILON = 1e-6
"""Added to a standard deviation that divides."""


@dataclass(frozen=True)
class GroupStatistics:
    """Of the group of each trajectory, `[S]` float64."""

    size: Tensor
    """Trajectories of the group that train."""
    mean: Tensor
    std: Tensor
    """Unbiased."""

    @property
    def alone(self) -> Tensor:
        """`[S]` bool: there is nothing to compare with."""
        return self.size <= 1


def group_statistics(x: AdvantageInputs, scores: Tensor, shares: Tensor | None = None) -> GroupStatistics:
    """Size, mean (in proportion to `shares [S]`, if given) and standard deviation of `scores [S]` within each group."""
    trains = x.trains
    size = x.per_group(trains)[x.groups]
    shares = trains if shares is None else shares * trains
    total, whole = x.per_group(scores * shares), x.per_group(shares)
    mean = (total / torch.where(whole > 0, whole, 1.0))[x.groups]
    variance = x.per_group((scores - mean).square() * trains)[x.groups] / (size - 1).clamp(min=1)
    alone = size <= 1
    return GroupStatistics(size, mean.masked_fill(alone, 0.0), variance.sqrt().masked_fill(alone, 1.0))


def groups_of_one(x: AdvantageInputs) -> int:
    """How many groups of the global batch are left with one trajectory that trains."""
    return int((x.per_group(x.trains) == 1).sum())


@dataclass(frozen=True)
class TwoLargest:
    """Of each group of the global batch, `[num_groups]`; of equals the first in the batch is the largest."""

    index: Tensor
    """Of the trajectory with the largest number, in the global batch; -1 of an empty group."""
    largest: Tensor
    second: Tensor
    """0 in a group of one."""


def two_largest(x: AdvantageInputs, numbers: Tensor) -> TwoLargest:
    """Of `numbers [S]`, over the trajectories of each group that train."""
    numbers = torch.where(x.everywhere(x.trains) > 0, x.everywhere(numbers.double()), -torch.inf)
    groups = x.everywhere(x.groups)
    order = numbers.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]  # by group, within it the largest first
    numbers, groups = numbers[order], groups[order]
    rank = torch.arange(len(groups), device=groups.device) - torch.searchsorted(groups, groups)
    index = torch.full((x.num_groups,), -1, device=groups.device)
    largest, second = torch.zeros(2, x.num_groups, dtype=torch.double, device=groups.device)
    index[groups[rank == 0]] = order[rank == 0]
    largest[groups[rank == 0]] = numbers[rank == 0]
    second[groups[rank == 1]] = numbers[rank == 1]
    return TwoLargest(index, largest, second)
