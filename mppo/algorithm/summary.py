"""Named numbers over the global batch, from one sum and one maximum over its parts."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction


class Summary:
    """Collects means, deviations and extremes; `finish` reduces all of them together.

    `x` and the mask `over` are vectors of one shape, per token or per trajectory; what the mask hides may be NaN.
    A number over nothing is 0.
    """

    def __init__(self):
        self._sums: dict[str, tuple[Tensor, Callable[[list[float]], float]]] = {}
        self._largest: dict[str, tuple[Tensor, float]] = {}

    def mean(self, name: str, x: Tensor, over: Tensor) -> None:
        self._sums[name] = (_moments(x, over)[:2], _mean)

    def normaliser(self, name: str, x: Tensor, over: Tensor) -> None:
        """The mean, or 1 where it is too small to divide by."""
        self._sums[name] = (_moments(x, over)[:2], _mean_or_one)

    def std(self, name: str, x: Tensor, over: Tensor, *, unbiased: bool) -> None:
        """Root of the mean squared deviation; `unbiased` divides by n - 1, and is 0 for fewer than two."""
        self._sums[name] = (_moments(x, over), _unbiased_std if unbiased else _std)

    def effective_sample_size(self, name: str, weights: Tensor, over: Tensor) -> None:
        """`mean(w)^2 / mean(w^2)`: the fraction of the sample that the weights leave, in (0, 1]."""
        self._sums[name] = (_moments(weights, over), _effective_sample_size)

    def largest(self, name: str, x: Tensor, over: Tensor) -> None:
        self._largest[name] = (_largest(x, over), 1.0)

    def smallest(self, name: str, x: Tensor, over: Tensor) -> None:
        self._largest[name] = (_largest(-x, over), -1.0)

    def finish(self, reduction: Reduction) -> "Reduced":
        """Over all parts of the batch."""
        moments: dict[str, list[float]] = {}
        if self._sums:
            sizes = [len(x) for x, _ in self._sums.values()]
            pieces = reduction.sum(torch.cat([x for x, _ in self._sums.values()])).split(sizes)
            moments = {name: piece.tolist() for name, piece in zip(self._sums, pieces, strict=True)}
        largest: dict[str, float] = {}
        if self._largest:
            extremes = reduction.max(torch.stack([x for x, _ in self._largest.values()])).tolist()
            largest = dict(zip(self._largest, extremes, strict=True))
        return Reduced(
            {name: (moments[name], number) for name, (_, number) in self._sums.items()},
            {name: (largest[name], sign) for name, (_, sign) in self._largest.items()},
        )


@dataclass(frozen=True)
class Reduced:
    """What is known of a whole batch. Those of several batches add up to that of all of them."""

    moments: dict[str, tuple[list[float], Callable[[list[float]], float]]] = field(default_factory=dict)
    """Sums, and the number that is made of them."""
    largest: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Extremes times their sign (-1 for a smallest), and the sign."""

    def __add__(self, other: "Reduced") -> "Reduced":
        """Of two batches with the same names."""
        return Reduced(
            {
                name: ([a + b for a, b in zip(sums, other.moments[name][0], strict=True)], number)
                for name, (sums, number) in self.moments.items()
            },
            {name: (max(x, other.largest[name][0]), sign) for name, (x, sign) in self.largest.items()},
        )

    def __or__(self, other: "Reduced") -> "Reduced":
        """Of one batch under two sets of names."""
        return Reduced(self.moments | other.moments, self.largest | other.largest)

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """The numbers under their names; one over nothing is 0."""
        means = {prefix + name: number(sums) for name, (sums, number) in self.moments.items()}
        extremes = {prefix + name: 0.0 if x == -torch.inf else sign * x for name, (x, sign) in self.largest.items()}
        return means | extremes


def _moments(x: Tensor, over: Tensor) -> Tensor:
    """Count, sum and sum of squares."""
    kept = x.double()[over.bool()]
    return torch.stack([torch.full_like(kept.sum(), len(kept)), kept.sum(), kept.square().sum()])


def _largest(x: Tensor, over: Tensor) -> Tensor:
    kept = x.double()[over.bool()]
    return kept.max() if len(kept) else torch.full((), -torch.inf, dtype=torch.double, device=x.device)


def _mean(moments: list[float]) -> float:
    count, total = moments
    return total / max(count, 1.0)


def _mean_or_one(moments: list[float]) -> float:
    mean = _mean(moments)
    return mean if mean > 1e-8 else 1.0


def _std(moments: list[float]) -> float:
    count, total, squares = moments
    mean = total / max(count, 1.0)
    return max(squares / max(count, 1.0) - mean * mean, 0.0) ** 0.5


def _unbiased_std(moments: list[float]) -> float:
    count = moments[0]
    return _std(moments) * (count / (count - 1)) ** 0.5 if count > 1 else 0.0


def _effective_sample_size(moments: list[float]) -> float:
    count, total, squares = moments
    return total * total / (count * squares) if squares else 0.0
