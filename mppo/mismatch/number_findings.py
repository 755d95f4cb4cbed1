"""What the log-probs say: which of the scorings disagree, and which change of the trainer makes them agree."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mppo.mismatch.comparison import Compared, Explanation, Gap, explanations, rivals
from mppo.mismatch.evidence import Evidence, Scored
from mppo.mismatch.finding import Cause, Finding, Place
from mppo.mismatch.hypotheses import Change, Hypotheses
from mppo.mismatch.truncation import truncation

FEWEST_SHIFTED = 8
"""Tokens below which their neighbours' log-probs may be theirs by chance."""


def numbers_of(evidence: Evidence, server: int) -> list[int]:
    """The trajectories that a server wrote, by their number."""
    return [n for n, scored in enumerate(evidence.trajectories) if scored.server == server]


def forward_gap(evidence: Evidence, server: int) -> tuple[Compared, Gap]:
    """The engine's reading of whole trajectories against the trainer's, both at temperature 1."""
    compared = Compared.of(
        evidence.trajectories, numbers_of(evidence, server), lambda s: s.prefill, lambda s: ~s.prefill.isnan()
    )
    return compared, compared.gap([s.reference for s in compared.trajectories])


def forward_findings(
    evidence: Evidence, server: int, base: Change, hypotheses: Hypotheses
) -> tuple[list[Finding], Change]:
    """Why the engine computes otherwise, beyond the change that its configuration tells of; and with which change of
    the trainer both agree."""
    compared, _ = forward_gap(evidence, server)
    gap = compared.gap_under(hypotheses, base)
    if not gap.exceeds(evidence.tolerance):
        return [], base
    tied, tolerance = evidence.model.tie_word_embeddings, evidence.tolerance
    good = explanations(compared, hypotheses, base, gap, tolerance=tolerance, of_model=True, tied=tied)
    if not good:
        return [_unexplained(gap, f"server {server}", "reading the same ids, engine and trainer differ by")], base
    who = f"server {server} and the trainer, reading the same ids, differ by"
    return [_explained(good, gap, who, f"server {server}")], good[0].change


def training_findings(evidence: Evidence, hypotheses: Hypotheses) -> list[Finding]:
    """Why what the trainer trains on is not what its weights give."""
    everything = range(len(evidence.trajectories))
    compared = Compared.of(evidence.trajectories, everything, lambda s: s.trained, lambda s: s.action_mask)
    base = Change(temperature=evidence.temperature)
    scores = compared.scores(hypotheses, base)
    gap = compared.gap(scores)
    if not gap.exceeds(evidence.tolerance):
        return []
    what = "the log-probs that are trained on and those of the same weights, scored anew, differ by"
    if (finding := _shifted(compared, scores, gap, what, evidence.tolerance)) is not None:
        return [finding]
    tied, tolerance = evidence.model.tie_word_embeddings, evidence.tolerance
    good = explanations(compared, hypotheses, base, gap, tolerance=tolerance, of_model=False, tied=tied)
    return [_explained(good, gap, what, "trainer") if good else _unexplained(gap, "trainer", what)]


def prefix_findings(evidence: Evidence) -> list[Finding]:
    """Whether cached prefixes give other log-probs than the same tokens read anew."""
    found = []
    for state in evidence.servers:
        numbers = numbers_of(evidence, state.number)
        compared = Compared.of(evidence.trajectories, numbers, lambda s: s.salted, lambda s: ~s.prefill.isnan())
        gap = compared.gap([s.prefill for s in compared.trajectories])
        if gap.worst > evidence.tolerance:
            found.append(_stale_prefix(compared, gap, state.number, evidence.tolerance))
    return found


def stale_prefixes(evidence: Evidence) -> set[int]:
    """Numbers of the trajectories that were written over one."""
    return {
        number
        for number, s in enumerate(evidence.trajectories)
        if float(torch.nan_to_num((s.salted - s.prefill).abs()).max()) > evidence.tolerance
    }


def _stale_prefix(compared: Compared, gap: Gap, server: int, tolerance: float) -> Finding:
    """The first token that shows it; the prefix before it is what is stale."""
    concerned = [s for s in compared.trajectories if bool(((s.salted - s.prefill).abs() > tolerance).any())]
    first = concerned[0]
    at = int(((first.salted - first.prefill).abs() > tolerance).nonzero()[0])
    shown = (
        f"with cached prefixes and without, server {server} differs from itself by {gap}, in {len(concerned)} of"
        f" {len(compared.trajectories)} trajectories; {first.calls[0].cached_tokens} tokens of this one's prompt came"
        " out of the cache"
    )
    return Finding(Cause.STALE_PREFIX, Place(worker=f"server {server}", trajectory=first.uid, token=at), shown)


def sampling_findings(
    evidence: Evidence, server: int, left_out: Collection[int], change: Change | None, hypotheses: Hypotheses
) -> list[Finding]:
    """What the engine reported when it wrote, and how it drew, against the trainer under `change`, with which both
    agree on the same ids (None: they do not)."""
    numbers = [n for n in numbers_of(evidence, server) if n not in left_out]
    settings = _settings(evidence, server)
    if not numbers:
        return settings
    asked = evidence.trajectories[numbers[0]].temperature
    compared = Compared.of(evidence.trajectories, numbers, lambda s: s.reported, lambda s: s.written)
    if change is None and asked != 1.0:
        return settings
    base = Change() if change is None else replace(change, temperature=asked)
    scores = [s.prefill for s in compared.trajectories] if change is None else compared.scores(hypotheses, base)
    gap = compared.gap(scores)
    if gap.exceeds(evidence.tolerance):
        return [*settings, _reported(evidence, compared, base, scores, gap, server, hypotheses, change is not None)]
    if settings or change is None:
        return settings
    return truncation(compared, base.temperature, hypotheses, server)


def _reported(
    evidence: Evidence,
    compared: Compared,
    base: Change,
    scores: Sequence[Tensor],
    gap: Gap,
    server: int,
    hypotheses: Hypotheses,
    explains: bool,
) -> Finding:
    scored = f"the same ids scored at temperature {base.temperature:g}"
    what = f"what server {server} reported when it wrote, and {scored}, differ by"
    if (finding := _shifted(compared, scores, gap, what, evidence.tolerance)) is not None:
        return finding
    good: list[Explanation] = []
    if explains:
        tied, tolerance = evidence.model.tie_word_embeddings, evidence.tolerance
        good = explanations(compared, hypotheses, base, gap, tolerance=tolerance, of_model=False, tied=tied)
    if good:
        return _explained(good, gap, what, f"server {server}")
    above = min(
        float(torch.where(mask, target - score, 0.0).min())
        for target, score, mask in zip(compared.targets, scores, compared.where, strict=True)
    )
    if gap.worst > evidence.tolerance and above >= -evidence.tolerance:
        shown = f"{what} {gap}, and are never less: they are renormalised over the tokens that were kept"
        return Finding(Cause.TOP_P, replace(gap.place, worker=f"server {server}"), shown, False)
    return _unexplained(gap, f"server {server}", what)


def _settings(evidence: Evidence, server: int) -> list[Finding]:
    """What follows from what was asked for alone."""
    numbers = numbers_of(evidence, server)
    if not numbers:
        return []
    first = evidence.trajectories[numbers[0]]
    at = int(first.written.nonzero()[0]) if bool(first.written.any()) else None
    where = Place(worker=f"server {server}", trajectory=first.uid, token=at)
    found = []
    if first.asked.temperature and first.temperature != evidence.temperature:
        shown = f"sampled at temperature {first.temperature:g}, trained at {evidence.temperature:g}"
        found.append(Finding(Cause.TEMPERATURE, where, shown, detail=first.temperature))
    if first.asked.temperature and (first.asked.top_p < 1 or first.asked.top_k):
        drawn = f"top_p={first.asked.top_p:g}, top_k={first.asked.top_k}"
        shown = f"sampled with {drawn}; trained on log-probs of all tokens"
        found.append(Finding(Cause.TOP_P, where, shown, detail=first.asked.top_p))
    return found


def _shifted(compared: Compared, scores: Sequence[Tensor], gap: Gap, what: str, tolerance: float) -> Finding | None:
    for by in (1, -1):
        moved = compared.shifted_gap(scores, by)
        if compared.tokens >= FEWEST_SHIFTED and not moved.exceeds(tolerance):
            shown = f"{what} {gap}; against the token {by:+d} from each it is {moved}"
            return Finding(Cause.MASK, replace(gap.place, turn=1), shown, detail=float(by))
    return None


def _explained(good: Sequence[Explanation], gap: Gap, what: str, who: str) -> Finding:
    best = good[0]
    where = replace(gap.place, tensor=best.tensor, worker=who)
    others = rivals(best, good[1:])
    shown = f"{what} {gap}, {best.text} {best.gap}"
    return Finding(best.cause, where, shown, proved=not others, or_else=others, detail=best.detail)


def _unexplained(gap: Gap, who: str, what: str) -> Finding:
    return Finding(Cause.UNEXPLAINED, replace(gap.place, worker=who), f"{what} {gap}", False)


def written_first(scored: Scored) -> int | None:
    """Position of the first token that the engine wrote."""
    return int(scored.written.nonzero()[0]) if bool(scored.written.any()) else None
