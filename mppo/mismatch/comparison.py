"""How far two scorings of the same tokens are apart, and which change of the trainer brings them together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.batch.trajectory import TrajectoryId
from mppo.mismatch.evidence import MEAN_SHARE, Scored
from mppo.mismatch.finding import Cause, Place
from mppo.mismatch.hypotheses import Change, Head, Hypotheses

BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
EPSILONS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
TEMPERATURES = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0)
"""Where a search begins; it goes on between the neighbours of the best."""
REFINEMENTS = 22
"""Passes of a golden-section search: it narrows by 0.618 each."""
SMALLER = 8.0
"""By so much a change must lessen the mean difference, where rounding keeps it from vanishing."""


@dataclass(frozen=True)
class Gap:
    """Between two scorings."""

    worst: float
    """Nats."""
    mean: float
    """Of absolute differences."""
    uid: TrajectoryId | None = None
    token: int | None = None
    """Where it is the largest."""

    def exceeds(self, tolerance: float) -> bool:
        """More than rounding explains, at one token or on average."""
        return self.worst > tolerance or self.mean > tolerance * MEAN_SHARE

    @property
    def place(self) -> Place:
        return Place(trajectory=self.uid, token=self.token)

    def __str__(self) -> str:
        return f"{self.worst:.2g} nats (mean {self.mean:.2g})"


@dataclass(frozen=True)
class Compared:
    """Log-probs that are to be explained, and where."""

    trajectories: tuple[Scored, ...]
    numbers: tuple[int, ...]
    """Of these in the evidence."""
    targets: tuple[Tensor, ...]
    """`[L]` each."""
    where: tuple[Tensor, ...]
    """`[L]` bool each."""

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Scored],
        numbers: Sequence[int],
        target: Callable[[Scored], Tensor],
        where: Callable[[Scored], Tensor],
    ) -> "Compared":
        """Those of these numbers; NaN is left out."""
        chosen = tuple(trajectories[n] for n in numbers)
        targets = tuple(target(s) for s in chosen)
        masks = tuple(where(s) & ~t.isnan() for s, t in zip(chosen, targets, strict=True))
        return cls(chosen, tuple(numbers), targets, masks)

    @property
    def tokens(self) -> int:
        return sum(int(mask.sum()) for mask in self.where)

    def gap(self, scores: Sequence[Tensor]) -> Gap:
        """To `[L]` of each of them. Of no tokens it is 0; a score that is NaN is infinitely far away."""
        worst, total = Gap(0.0, 0.0), 0.0
        for scored, target, mask, score in zip(self.trajectories, self.targets, self.where, scores, strict=True):
            if not bool(mask.any()):
                continue
            apart = torch.where(mask, (target - score).abs(), 0.0).nan_to_num(nan=math.inf)
            total += float(apart.sum())
            at = int(apart.argmax())
            if float(apart[at]) > worst.worst:
                worst = Gap(float(apart[at]), 0.0, scored.uid, at)
        return replace(worst, mean=total / max(self.tokens, 1))

    def scores(self, hypotheses: Hypotheses, change: Change) -> list[Tensor]:
        found = hypotheses.score(change)
        return [found[n] for n in self.numbers]

    def gap_under(self, hypotheses: Hypotheses, change: Change) -> Gap:
        return self.gap(self.scores(hypotheses, change))

    def shifted_gap(self, scores: Sequence[Tensor], by: int) -> Gap:
        """To the score of the token `by` positions after each, where that was scored too."""
        masks = []
        for mask in self.where:
            neighbour = torch.roll(mask, -by)
            neighbour[-by if by > 0 else 0 : None if by > 0 else -by] = False
            masks.append(mask & neighbour)
        return replace(self, where=tuple(masks)).gap([torch.roll(score, -by) for score in scores])


@dataclass(frozen=True)
class Explanation:
    cause: Cause
    change: Change
    gap: Gap
    """What is left."""
    text: str
    tensor: str | None = None
    detail: float | str | None = None


def explanations(
    compared: Compared,
    hypotheses: Hypotheses,
    base: Change,
    gap: Gap,
    *,
    tolerance: float,
    of_model: bool,
    tied: bool,
) -> list[Explanation]:
    """Every change of the trainer that makes the difference vanish, or nearly; the best first.

    `of_model` are changes of the whole forward pass too, not of the head alone. Collective.
    """
    found = _of_head(compared, hypotheses, base, tied)
    found.append(_fitted(compared, hypotheses, Cause.TEMPERATURE, base, "temperature", TEMPERATURES))
    if of_model:
        found.append(_fitted(compared, hypotheses, Cause.ROPE, base, "rope_theta", BASES))
        found.append(_fitted(compared, hypotheses, Cause.EPSILON, base, "rms_norm_eps", EPSILONS))
    good = [e for e in found if _is_good(e.gap, gap, tolerance)]
    return sorted(good, key=lambda e: e.gap.mean)


def _is_good(left: Gap, gap: Gap, tolerance: float) -> bool:
    if left.mean * SMALLER < gap.mean:
        return True
    return not left.exceeds(tolerance) and left.mean * 2 < gap.mean


def rivals(best: Explanation, others: Sequence[Explanation]) -> tuple[Cause, ...]:
    """Those whose rest is as small as makes no difference."""
    return tuple(e.cause for e in others if e.cause != best.cause and e.gap.mean < 2 * best.gap.mean + 1e-7)


def _of_head(compared: Compared, hypotheses: Hypotheses, base: Change, tied: bool) -> list[Explanation]:
    asked = [
        (Cause.BF16_HEAD, Head.BFLOAT16, "with logits in bfloat16"),
        (Cause.PADDING, Head.PADDED, "with rows of padding in the softmax"),
    ]
    if not tied:
        asked.append((Cause.UNTIED_HEAD, Head.EMBEDDING, "with the embedding as output layer"))
    found = []
    for cause, head, text in asked:
        change = replace(base, head=head)
        gap = compared.gap_under(hypotheses, change)
        found.append(Explanation(cause, change, gap, text, tensor="lm_head.weight"))
    return found


_TENSORS = {"rope_theta": "rotary_emb.inv_freq", "rms_norm_eps": "model.layers.0.input_layernorm.weight"}


def _fitted(
    compared: Compared, hypotheses: Hypotheses, cause: Cause, base: Change, field: str, grid: Sequence[float]
) -> Explanation:
    """The best value of a field of `Change`: of the grid, and if that is no fit yet, between its neighbours."""

    def gap_at(value: float) -> Gap:
        return compared.gap_under(hypotheses, replace(base, **{field: value}))  # type: ignore[arg-type]

    gaps = [gap_at(value) for value in grid]
    best = min(range(len(grid)), key=lambda i: gaps[i].mean)
    value, gap = grid[best], gaps[best]
    if gap.mean > 1e-5:
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        refined = _golden(lambda x: gap_at(math.exp(x)).mean, math.log(low), math.log(high))
        if (closer := gap_at(math.exp(refined))).mean < gap.mean:
            value, gap = math.exp(refined), closer
    change = replace(base, **{field: value})  # type: ignore[arg-type]
    return Explanation(cause, change, gap, f"with {field}={value:.4g}", _TENSORS.get(field), value)


def _golden(f: Callable[[float], float], low: float, high: float) -> float:
    """Where `f` is the least."""
    ratio = (math.sqrt(5) - 1) / 2
    one, other = high - ratio * (high - low), low + ratio * (high - low)
    at_one, at_other = f(one), f(other)
    for _ in range(REFINEMENTS):
        if at_one < at_other:
            high, other, at_other = other, one, at_one
            one = high - ratio * (high - low)
            at_one = f(one)
        else:
            low, one, at_one = one, other, at_other
            other = low + ratio * (high - low)
            at_other = f(other)
    return (low + high) / 2
