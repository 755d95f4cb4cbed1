"""Named numbers over the global batch, from one sum and one maximum over its parts."""

from collections.abc import Callable

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

    def finish(self, reduction: Reduction) -> dict[str, float]:
        """The numbers over all parts, under their names."""
        result = {}
        if self._sums:
            pieces = reduction.sum(torch.cat([moments for moments, _ in self._sums.values()]))
            sizes = [len(moments) for moments, _ in self._sums.values()]
            for (name, (_, number)), piece in zip(self._sums.items(), pieces.split(sizes), strict=True):
                result[name] = number(piece.tolist())
        if self._largest:
            extremes = reduction.max(torch.stack([x for x, _ in self._largest.values()])).tolist()
            for (name, (_, sign)), extreme in zip(self._largest.items(), extremes, strict=True):
                result[name] = sign * extreme if extreme > -torch.inf else 0.0
        return result


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
