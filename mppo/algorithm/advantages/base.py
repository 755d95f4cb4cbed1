"""What an advantage estimator is given and what it returns, and the pieces that several of them share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.registry import Registry


def no_reduction(x: Tensor) -> Tensor:
    """The reduction of a batch that is whole on this process."""
    return x


@dataclass(frozen=True)
class AdvantageInputs:
    """This rank's part of the batch, packed, and the way to sum over all parts."""

    rewards: Tensor
    """`[T]` token-level rewards, after any KL penalty."""
    mask: Tensor
    """`[T]`: positions that are actions; rewards stand there, also those of rejected actions."""
    segments: Segments
    groups: Tensor
    """`[S]` long: the prompt group of each trajectory, in `[0, num_groups)` over the *global* batch."""
    num_groups: int
    values: Tensor | None = None
    """`[T]` the critic's predictions, for estimators registered with `critic=True`."""
    reduce_sum: Callable[[Tensor], Tensor] = no_reduction
    """Sums a tensor over all parts of the global batch (an all-reduce over data-parallel ranks)."""
    kept: Tensor | None = None
    """`[T]`: the actions that train, where some are rejected; None: all of them."""

    @property
    def training(self) -> Tensor:
        """`[T]`: the positions that group and batch statistics are over."""
        return self.mask if self.kept is None else self.kept

    @property
    def scores(self) -> Tensor:
        """`[S]`: the sum of all rewards of each trajectory, in float64."""
        return self.segments.sum(self.rewards.double(), torch.ones_like(self.mask))

    def per_group(self, x: Tensor) -> Tensor:
        """`[S] -> [num_groups]`: sum over the trajectories of each group of the global batch."""
        return self.reduce_sum(
            torch.zeros(self.num_groups, dtype=x.dtype, device=x.device).index_add(0, self.groups, x)
        )


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor
    """`[T]`, 0 where nothing trains."""
    returns: Tensor
    """`[T]`, the critic's target."""


Estimator = Callable[[AdvantageInputs, object], Advantages]
ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
"""Register with `config=` (dataclass of knobs) and `critic=` (whether it needs values)."""


def whiten(x: Tensor, mask: Tensor, reduce_sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean 0 and (unbiased) variance 1 over the masked positions of the global batch; 0 outside the mask.

    With fewer than two positions there is no variance: what is returned is 0 everywhere.
    """
    kept = torch.where(mask.bool(), x.double(), torch.zeros_like(x, dtype=torch.double))
    total, count = reduce_sum(torch.stack([kept.sum(), mask.sum().double()]))
    mean = total / count.clamp(min=1)
    centred = (kept - mean) * mask
    variance = reduce_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + 1e-8)).to(x.dtype)


def discounted_suffix_sum(x: Tensor, ids: Tensor, discount: float) -> Tensor:
    """`y[t] = x[t] + discount * y[t+1]` within each run of equal `ids`, over `[N]`.

    A doubling scan: after step k, y[t] holds the terms up to t + 2^k; log2(longest run) passes over the vector.
    """
    longest = int(ids.bincount().max()) if len(ids) else 0
    shift = 1
    while shift < longest:
        same = (ids[shift:] == ids[:-shift]).to(x.dtype)
        x = torch.cat([x[:-shift] + discount**shift * same * x[shift:], x[-shift:]])
        shift *= 2
    return x
