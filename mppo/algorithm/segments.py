"""Which trajectory each packed position belongs to, and sums per trajectory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """The trajectories of a packed vector.

    Losses use this object, never `cu_seqlens`, for anything per sequence, so that they need not know
    how the positions of a trajectory are spread.
    """

    ids: Tensor
    """`[T]` long: index in `[0, count)` of the trajectory that position t belongs to; non-decreasing."""
    count: int
    """S, the number of trajectories."""
    combine: Callable[[Tensor], Tensor] | None = None
    """Adds `[S]` up over the ranks that hold slices of the same trajectories (context parallelism), and their
    gradients likewise; None: the trajectories are whole here."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Segments":
        """From the `[S+1]` boundaries of a packed batch."""
        lengths = cu_seqlens.diff()
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return cls(ids, len(lengths))

    def sum(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[T] -> [S]`: sum of `x` over the masked positions of each trajectory; what the mask hides may be NaN."""
        masked = torch.where(mask.bool(), x, torch.zeros_like(x))
        total = torch.zeros(self.count, dtype=x.dtype, device=x.device).index_add(0, self.ids, masked)
        return total if self.combine is None else self.combine(total)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[T] -> [S]`: mean over the masked positions of each trajectory, 0 for an empty one."""
        return self.sum(x, mask) / self.lengths(mask).clamp(min=1).to(x.dtype)

    def max(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[T] -> [S]`: largest over the masked positions of each trajectory, 0 for an empty one.

        Raises ValueError when the trajectories are not whole here.
        """
        if self.combine is not None:
            raise ValueError("Segments.max needs whole trajectories; take it before they are cut")
        hidden = torch.where(mask.bool(), x, torch.full_like(x, -torch.inf))
        largest = torch.full((self.count,), -torch.inf, dtype=x.dtype, device=x.device)
        largest = largest.scatter_reduce(0, self.ids, hidden, "amax")
        return torch.where(self.lengths(mask) > 0, largest, torch.zeros_like(largest))

    def lengths(self, mask: Tensor) -> Tensor:
        """`[T] -> [S]` long: how many positions of each trajectory the mask selects."""
        count = torch.zeros(self.count, dtype=torch.long, device=mask.device).index_add(0, self.ids, mask.long())
        return count if self.combine is None else self.combine(count)

    def expand(self, per_trajectory: Tensor) -> Tensor:
        """`[S] -> [T]`: give each position the value of its trajectory."""
        return per_trajectory[self.ids]
