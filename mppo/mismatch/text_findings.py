"""What trajectories say of themselves: ids that the engine did not write, and masks that are not where it wrote."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mppo.mismatch.evidence import Call, Evidence, Scored
from mppo.mismatch.finding import Cause, Finding, Place

WINDOW = 8
"""Tokens that are shown of a turn."""


def text_findings(evidence: Evidence) -> list[Finding]:
    """The first of each kind, with how many trajectories it befell."""
    retokenised = list(_retokenised(evidence))
    changed = {finding.place.trajectory for finding in retokenised}
    masks = [f for s in evidence.trajectories if s.uid not in changed and (f := _mask(s)) is not None]
    shifted = [f for s in evidence.trajectories if s.uid not in changed and (f := _shifted_log_probs(s)) is not None]
    found = []
    for group in (retokenised, [f for f in masks if f.cause is Cause.MASK] or shifted):
        found += _first(group, len(evidence.trajectories))
    return found + _first([f for f in masks if f.cause is Cause.OTHER_MASK], len(evidence.trajectories))


def _first(findings: list[Finding], total: int) -> list[Finding]:
    if not findings:
        return []
    one = findings[0]
    text = f"{one.shown}; in {len(findings)} of {total} trajectories"
    return [Finding(one.cause, one.place, text, one.proved, one.or_else, one.detail)]


def changed_ids(scored: Scored) -> tuple[int, int] | None:
    """Turn (from 1) and position of the first token that is not what the engine read or wrote."""
    ids = scored.token_ids.tolist()
    for number, call in enumerate(scored.calls, start=1):
        engine = (*call.prompt_ids, *call.written_ids)
        at = next((i for i, token in enumerate(engine) if i >= len(ids) or ids[i] != token), None)
        if at is not None:
            return _turn_of(scored.calls, at, number), at
    return None


def _turn_of(calls: tuple[Call, ...], at: int, number: int) -> int:
    """In which turn the token stands: a later prompt may have an earlier answer wrong."""
    return next((turn for turn, call in enumerate(calls, start=1) if call.start <= at < call.stop), number)


def _retokenised(evidence: Evidence) -> Iterator[Finding]:
    for scored in evidence.trajectories:
        changed = changed_ids(scored)
        if changed is None:
            continue
        turn, at = changed
        call = scored.calls[turn - 1]
        engine = (*call.prompt_ids, *call.written_ids)[at : at + WINDOW]
        trained = scored.token_ids[at : at + WINDOW].tolist()
        shown = f"the engine had {list(engine)} there, the trajectory has {trained}"
        yield Finding(Cause.RETOKENISED, Place(trajectory=scored.uid, token=at, turn=turn), shown)


def _mask(scored: Scored) -> Finding | None:
    written, mask = scored.written, scored.action_mask
    if torch.equal(written, mask):
        return None
    at = int((written != mask).nonzero()[0])
    where = Place(trajectory=scored.uid, token=at, turn=1)
    for shift in (-1, 1):
        if torch.equal(_shifted(written, shift), mask):
            shown = f"the engine wrote {_ranges(written)}, the action mask has {_ranges(mask)}"
            return Finding(Cause.MASK, where, shown, detail=float(shift))
    shown = f"the engine wrote {int(written.sum())} tokens, the action mask has {int(mask.sum())}"
    return Finding(Cause.OTHER_MASK, where, shown)


def _shifted(mask: Tensor, by: int) -> Tensor:
    """Moved to later positions (`by` > 0) or earlier ones; what falls off is lost."""
    moved = torch.zeros_like(mask)
    if by > 0:
        moved[by:] = mask[:-by]
    else:
        moved[:by] = mask[-by:]
    return moved


def _shifted_log_probs(scored: Scored) -> Finding | None:
    """The mask is right, but the log-probs beside it are those of the tokens before or after."""
    reported, own = scored.reported, scored.rollout_log_probs
    where = scored.action_mask & ~reported.isnan()
    if int(where.sum()) < 3 or torch.allclose(own[where], reported[where], atol=1e-6):
        return None
    for shift in (-1, 1):
        moved = _shifted_values(reported, shift)
        both = scored.action_mask & ~moved.isnan()
        if int(both.sum()) > 1 and torch.allclose(own[both], moved[both], atol=1e-6):
            at = int(where.nonzero()[0])
            shown = f"the log-probs of the trajectory are those reported for the token {-shift:+d} from it"
            return Finding(Cause.MASK, Place(trajectory=scored.uid, token=at, turn=1), shown, detail=float(shift))
    return None


def _shifted_values(x: Tensor, by: int) -> Tensor:
    moved = torch.full_like(x, torch.nan)
    if by > 0:
        moved[by:] = x[:-by]
    else:
        moved[:by] = x[-by:]
    return moved


def _ranges(mask: Tensor) -> str:
    """`[3, 7), [9, 12)`"""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, stops = (edges == 1).nonzero().view(-1).tolist(), (edges == -1).nonzero().view(-1).tolist()
    return ", ".join(f"[{start}, {stop})" for start, stop in zip(starts, stops, strict=True)) or "nothing"
