"""Numbers about a batch that are exact over all of it, whatever the cut.

There is one way to get such a number. Every piece of the batch (a micro-batch, what a rank holds, a mini-batch) makes a
`Statistic`: not the number but the moments it follows from. Those of several pieces add up, `reduced` adds up over
data-parallel ranks, and at the end `value` is the number. Everything is float64.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction

MOMENTS = ("count", "total", "squares", "largest")


@dataclass(frozen=True)
class Statistic:
    """Moments of some numbers, as 0-dim float64 tensors, and the number that is made of them."""

    number: Callable[["Statistic"], float]
    count: Tensor
    total: Tensor
    squares: Tensor | None = None
    """Sum of squared deviations from the mean, where the number needs it: unlike a sum of squares it loses nothing
    where the mean is far larger than the deviation."""
    largest: Tensor | None = None
    """Where the number needs it; -inf of nothing."""

    def __add__(self, other: "Statistic") -> "Statistic":
        """Of both pieces together (Chan, Golub and LeVeque, 1979)."""
        both = replace(self, count=self.count + other.count, total=self.total + other.total)
        if self.squares is not None:
            both = replace(both, squares=self.squares_about(both.mean) + other.squares_about(both.mean))
        if self.largest is not None:
            both = replace(both, largest=torch.maximum(self.largest, _given(other.largest)))
        return both

    @property
    def value(self) -> float:
        """The number; 0 over nothing."""
        return self.number(self)

    @property
    def is_total(self) -> bool:
        """Whether it is a sum, such as a loss whose token weights are in it already."""
        return self.number is _total

    @property
    def mean(self) -> Tensor:
        """0-dim; 0 over nothing."""
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """0-dim, unbiased; 0 of fewer than two numbers."""
        return _given(self.squares) / (self.count - 1).clamp(min=1)

    def squares_about(self, centre: Tensor) -> Tensor:
        """Sum of squared deviations from `centre`."""
        return _given(self.squares) + self.count * (self.mean - centre).square()

    def reduced(self, reduction: Reduction) -> "Statistic":
        """Over what all ranks hold."""
        return reduced({"": self}, reduction)[""]


Statistics = dict[str, Statistic]
"""By the name of the number."""


def mean(x: Tensor, over: Tensor) -> Statistic:
    """Mean of `x` over the mask `over` of the same shape; what the mask hides may be NaN, here and below."""
    return Statistic(_mean, _count(over), _kept(x, over).sum())


def normaliser(x: Tensor, over: Tensor) -> Statistic:
    """The mean, or 1 where it is too small to divide by."""
    return replace(mean(x, over), number=_mean_or_one)


def total(x: Tensor) -> Statistic:
    """Sum over all entries of all pieces."""
    return Statistic(_total, torch.full((), x.numel(), dtype=torch.double, device=x.device), x.detach().double().sum())


def std(x: Tensor, over: Tensor, *, unbiased: bool) -> Statistic:
    """Root of the mean squared deviation; `unbiased` divides by n - 1, and is 0 for fewer than two."""
    return _with_squares(_unbiased_std if unbiased else _std, x, over)


def effective_sample_size(importance_weights: Tensor, over: Tensor) -> Statistic:
    """`mean(w)^2 / mean(w^2)`: the fraction of the sample that the weights leave, in (0, 1]."""
    return _with_squares(_effective_sample_size, importance_weights, over)


def largest(x: Tensor, over: Tensor) -> Statistic:
    return _with_largest(_largest, x, over)


def smallest(x: Tensor, over: Tensor) -> Statistic:
    return _with_largest(_smallest, -x, over)


def mean_and_extremes(name: str, x: Tensor, over: Tensor) -> Statistics:
    """`name/mean`, `name/min` and `name/max`."""
    return {f"{name}/mean": mean(x, over), f"{name}/min": smallest(x, over), f"{name}/max": largest(x, over)}


@dataclass(frozen=True)
class TokenStatistic:
    """A metric that a loss reports: the mean of `value` over the positions that `over` selects."""

    value: Tensor
    """`[T]`"""
    over: Tensor | None = None
    """`[T]` mask of the denominator; None stands for the mask of the loss itself."""

    def reduce(self, mask: Tensor) -> Statistic:
        return mean(self.value, mask if self.over is None else self.over)


def add_up(pieces: Iterable[Statistics]) -> Statistics:
    """Of all pieces together; a name that only some of them have counts those."""
    summed: Statistics = {}
    for piece in pieces:
        for name, statistic in piece.items():
            summed[name] = summed[name] + statistic if name in summed else statistic
    return summed


def reduced(statistics: Statistics, reduction: Reduction) -> Statistics:
    """Over what all ranks hold of the batch, on the host. Every rank brings the same names.

    Costs one wait for the device and one collective on the host, in which every rank learns the moments of all; they
    are put together in rank order, so that all ranks have the same numbers to the bit.
    """
    if not statistics:
        return {}
    names = sorted(statistics)
    held = [(name, moment) for name in names for moment in MOMENTS if getattr(statistics[name], moment) is not None]
    mine = torch.stack([getattr(statistics[name], moment) for name, moment in held]).cpu()
    of_ranks: list[Statistics] = []
    for row in reduction.stack(mine).unbind():
        moments: dict[str, dict[str, Any]] = {name: {} for name in names}
        for (name, moment), number in zip(held, row.unbind(), strict=True):
            moments[name][moment] = number
        of_ranks.append({name: replace(statistics[name], **moments[name]) for name in names})
    return add_up(of_ranks)


def numbers(statistics: Statistics) -> dict[str, float]:
    """The numbers under their names."""
    return {name: statistic.value for name, statistic in statistics.items()}


def prefixed(prefix: str, statistics: Statistics) -> Statistics:
    return {prefix + name: statistic for name, statistic in statistics.items()}


def _given(moment: Tensor | None) -> Tensor:
    if moment is None:
        raise ValueError("this statistic was made without the moment that is asked for")
    return moment


def _count(over: Tensor) -> Tensor:
    return over.sum().double()


def _kept(x: Tensor, over: Tensor) -> Tensor:
    return torch.where(over.bool(), x.detach().double(), 0.0)


def _with_squares(number: Callable[[Statistic], float], x: Tensor, over: Tensor) -> Statistic:
    statistic = Statistic(number, _count(over), _kept(x, over).sum())
    return replace(statistic, squares=_kept(x.double() - statistic.mean, over).square().sum())


def _with_largest(number: Callable[[Statistic], float], x: Tensor, over: Tensor) -> Statistic:
    shown = torch.where(over.bool(), x.detach().double(), -torch.inf)
    nothing = torch.full((1,), -torch.inf, dtype=torch.double, device=x.device)
    return Statistic(number, _count(over), _kept(x, over).sum(), largest=torch.cat([shown.flatten(), nothing]).max())


def _mean(s: Statistic) -> float:
    return s.mean.item()


def _mean_or_one(s: Statistic) -> float:
    return s.mean.item() if s.mean.item() > 1e-8 else 1.0


def _total(s: Statistic) -> float:
    return s.total.item()


def _std(s: Statistic) -> float:
    return (_given(s.squares) / s.count.clamp(min=1)).sqrt().item()


def _unbiased_std(s: Statistic) -> float:
    return s.variance.sqrt().item()


def _effective_sample_size(s: Statistic) -> float:
    mean_square = s.squares_about(torch.zeros_like(s.mean)).item()
    return s.total.item() ** 2 / (s.count.item() * mean_square) if mean_square else 0.0


def _largest(s: Statistic) -> float:
    return _given(s.largest).item() if s.count.item() else 0.0


def _smallest(s: Statistic) -> float:
    return -_given(s.largest).item() if s.count.item() else 0.0
