"""Metrics as numerator and denominator, so that they are exact over the global batch whatever the cut."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStatistic:
    """A metric that a loss reports: the mean of `value` over the positions that `over` selects."""

    value: Tensor
    """`[T]`"""
    over: Tensor | None = None
    """`[T]` mask of the denominator; None stands for the mask of the loss itself."""

    def reduce(self, mask: Tensor) -> "Ratio":
        over = mask if self.over is None else self.over
        return Ratio.mean(self.value.detach(), over)


@dataclass(frozen=True)
class Ratio:
    """Numerator and denominator of one metric: two 0-dim float64 tensors that add up over pieces of a batch."""

    numerator: Tensor
    denominator: Tensor
    is_total: bool = False
    """A plain sum, such as a loss whose weights are in it already; the denominator plays no part."""

    @classmethod
    def mean(cls, value: Tensor, mask: Tensor) -> "Ratio":
        """Mean of `value [T]` over `mask [T]`; what the mask hides may be NaN."""
        kept = torch.where(mask.bool(), value.double(), torch.zeros_like(value, dtype=torch.double))
        return cls(kept.sum(), mask.sum().double())

    @classmethod
    def total(cls, value: Tensor) -> "Ratio":
        """Sum of `value [T]` over the pieces of the batch."""
        return cls(value.detach().double().sum(), torch.zeros((), dtype=torch.double, device=value.device), True)

    def __add__(self, other: "Ratio") -> "Ratio":
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator, self.is_total)

    @property
    def value(self) -> float:
        """The metric; a mean over nothing is 0."""
        denominator = 1.0 if self.is_total else self.denominator.item()
        return self.numerator.item() / denominator if denominator else 0.0


def add_up(pieces: list[dict[str, Ratio]]) -> dict[str, Ratio]:
    """Sum metrics of the same names over pieces of a batch."""
    total: dict[str, Ratio] = {}
    for piece in pieces:
        for name, ratio in piece.items():
            total[name] = total[name] + ratio if name in total else ratio
    return total
