"""Whether tokens were drawn among the likeliest only: log-probs do not tell, but the unlikely ones never occur."""

import math
from dataclasses import dataclass

import torch

from mppo.mismatch.comparison import Compared
from mppo.mismatch.finding import Cause, Finding, Place
from mppo.mismatch.hypotheses import Hypotheses

CHANCE = 1e-9
"""Of a sample that honest sampling gives so rarely truncation is said."""
FEWEST = 40
"""Tokens below which nothing is said."""


@dataclass(frozen=True)
class _Largest:
    """Of all tokens, and where it stands."""

    value: float
    place: Place


def truncation(compared: Compared, temperature: float, hypotheses: Hypotheses, server: int) -> list[Finding]:
    """At most one finding: top-p or top-k, whichever honest sampling would look like more rarely.

    Let `m` be the probability of all words at least as likely as the token that was drawn. Drawn honestly,
    P(m <= x) <= x, so that all of N tokens have m <= x with a chance of at most x^N. And all are among the k likeliest
    words with a chance of the product of what those words have together. Collective.
    """
    if not compared.trajectories[0].asked.temperature or compared.tokens < FEWEST:
        return []
    found = hypotheses.likelihoods(temperature)
    mass, rank = _largest(compared, found.mass, server), _largest(compared, found.rank, server)
    k = round(rank.value)
    top = hypotheses.likelihoods(temperature, k).top
    pairs = zip(compared.numbers, compared.where, strict=True)
    kept = [top[n][mask].clamp(min=1e-30, max=1.0).log().sum() for n, mask in pairs]
    by_mass = compared.tokens * math.log(min(max(mass.value, 1e-30), 1.0))
    by_rank = float(torch.stack(kept).sum())
    tokens = f"each of {compared.tokens} tokens is among the"
    candidates = [
        (by_mass, Cause.TOP_P, mass, f"{tokens} likeliest that have {mass.value:.1%} of the probability together"),
        (by_rank, Cause.TOP_K, rank, f"{tokens} {k} likeliest"),
    ]
    unlikely = sorted((c for c in candidates if c[0] < math.log(CHANCE)), key=lambda c: c[0])
    if not unlikely:
        return []
    chance, cause, largest, shown = unlikely[0]
    told = f"{shown}; drawn from all, the chance of that is below 1e{math.ceil(chance / math.log(10))}"
    others = tuple(other for _, other, _, _ in unlikely[1:])
    return [Finding(cause, largest.place, told, proved=not others, or_else=others, detail=largest.value)]


def _largest(compared: Compared, values: list[torch.Tensor], server: int) -> _Largest:
    found = _Largest(0.0, Place())
    for number, scored, mask in zip(compared.numbers, compared.trajectories, compared.where, strict=True):
        masked = torch.where(mask, values[number], 0.0)
        if float(masked.max()) > found.value:
            at = int(masked.argmax())
            found = _Largest(float(masked.max()), Place(None, f"server {server}", scored.uid, at))
    return found
