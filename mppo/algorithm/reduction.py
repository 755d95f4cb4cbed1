"""From numbers about what this rank holds of a batch to numbers about the whole of it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _alone(x: Tensor) -> Tensor:
    return x[None]


@dataclass(frozen=True)
class Reduction:
    """Over what data-parallel ranks hold of the global batch. Every rank calls alike, whatever it holds."""

    sum: Callable[[Tensor], Tensor] = _as_it_is
    """Elementwise, over tensors of one shape."""
    stack: Callable[[Tensor], Tensor] = _alone
    """`x` of each rank, all of one shape, `[ranks, *shape]` in rank order."""
    gather: Callable[[Tensor], Tensor] = _as_it_is
    """`[n_r]` of each rank -> `[sum of n_r]`, in rank order."""


WHOLE = Reduction()
"""Of a batch that is whole on this process."""
