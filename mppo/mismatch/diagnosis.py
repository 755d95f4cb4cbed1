"""Names the causes of a disagreement, from the most specific evidence to the least: checksums, versions, configuration,
ids and masks, cached prefixes, and then the numbers themselves."""

from dataclasses import fields, replace

from mppo.megatron.model_config import ModelConfig
from mppo.mismatch.comparison import Gap
from mppo.mismatch.evidence import Evidence, ServerState
from mppo.mismatch.finding import Cause, Finding, Place
from mppo.mismatch.hypotheses import Change, Head, Hypotheses
from mppo.mismatch.number_findings import (
    forward_findings,
    forward_gap,
    numbers_of,
    prefix_findings,
    sampling_findings,
    stale_prefixes,
    training_findings,
    written_first,
)
from mppo.mismatch.text_findings import changed_ids, text_findings
from mppo.mismatch.weight_findings import differing, weight_findings

OF_THE_RUN = ("make_vocab_size_divisible_by", "moe_aux_loss_coeff", "max_position_embeddings", "rope_scaling")
"""Fields of ModelConfig that do not change what is computed; `rope_scaling` is looked at with the base."""
_NAMED = {
    "rope_theta": (Cause.ROPE, "rotary_emb.inv_freq"),
    "rms_norm_eps": (Cause.EPSILON, "model.layers.0.input_layernorm.weight"),
    "tie_word_embeddings": (Cause.UNTIED_HEAD, "lm_head.weight"),
}


def diagnose(evidence: Evidence, hypotheses: Hypotheses) -> list[Finding]:
    """Why the log-probs of both sides differ: one finding for each cause and place; none, where they do not.

    A pure function of the evidence and of the scores that it asks for. Collective, as the hypotheses are.
    """
    agrees = [s.number for s in evidence.servers if not forward_gap(evidence, s.number)[1].exceeds(evidence.tolerance)]
    found = weight_findings(evidence, hypotheses, agrees)
    found += [finding for server in evidence.servers for finding in _version(evidence, server)]
    found += text_findings(evidence)
    found += prefix_findings(evidence)
    found += training_findings(evidence, hypotheses)
    left_out = stale_prefixes(evidence) | _changed(evidence)
    for server in evidence.servers:
        told, change = _configuration(evidence, server, hypotheses)
        found += told
        may_differ = bool(differing(evidence, server)) and server.number not in agrees
        if not may_differ:
            of_forward, change = forward_findings(evidence, server.number, change, hypotheses)
            found += of_forward
            may_differ = any(finding.cause is Cause.UNEXPLAINED for finding in of_forward)
        found += sampling_findings(evidence, server.number, left_out, None if may_differ else change, hypotheses)
    return _without_repetition(found)


def _changed(evidence: Evidence) -> set[int]:
    """Trajectories whose ids are not those that the engine had: what it reported is of others."""
    return {n for n, scored in enumerate(evidence.trajectories) if changed_ids(scored) is not None}


def _without_repetition(found: list[Finding]) -> list[Finding]:
    """One of those that differ only in what shows them."""
    kept: dict[tuple[Cause, str | None, str | None], Finding] = {}
    for finding in found:
        worker = finding.place.worker if finding.place.tensor else None
        kept.setdefault((finding.cause, finding.place.tensor, worker), finding)
    return list(kept.values())


def _version(evidence: Evidence, server: ServerState) -> list[Finding]:
    """Versions that a server says it has, or had when it wrote, and was not given."""
    expected = str(evidence.version)
    for number in numbers_of(evidence, server.number):
        scored = evidence.trajectories[number]
        for turn, call in enumerate(scored.calls, start=1):
            for span in call.spans:
                if span.weight_version != evidence.version:
                    where = Place(None, f"server {server.number}", scored.uid, call.start + span.start, turn)
                    told = "no version of a refit" if span.weight_version < 0 else f"version {span.weight_version}"
                    shown = f"written under {told}, the trainer's weights are {expected}"
                    return [Finding(Cause.VERSION, where, f"{shown}; the server says {server.version}")]
    if server.version == expected:
        return []
    numbers = numbers_of(evidence, server.number)
    first = evidence.trajectories[numbers[0]] if numbers else None
    where = Place(worker=f"server {server.number}")
    if first is not None:
        where = replace(where, trajectory=first.uid, token=written_first(first))
    shown = f"the server says that it holds version {server.version}, the trainer's weights are {expected}"
    return [Finding(Cause.VERSION, where, shown)]


def _configuration(evidence: Evidence, server: ServerState, hypotheses: Hypotheses) -> tuple[list[Finding], Change]:
    """Fields that the server read otherwise, and what they change in the trainer's scores."""
    if server.model is None:
        return [], Change()
    names = _differing_fields(evidence.model, server.model)
    change = Change(
        rope_theta=server.model.rope_theta if "rope_theta" in names else None,
        rms_norm_eps=server.model.rms_norm_eps if "rms_norm_eps" in names else None,
        head=Head.EMBEDDING if "tie_word_embeddings" in names and server.model.tie_word_embeddings else Head.EXACT,
    )
    compared, gap = forward_gap(evidence, server.number)
    rest = compared.gap_under(hypotheses, change) if change != Change() else gap
    return [_field(evidence, server, name, gap, rest) for name in names], change


def _differing_fields(trainer: ModelConfig, server: ModelConfig) -> list[str]:
    names = [f.name for f in fields(ModelConfig) if f.name not in OF_THE_RUN]
    found = [name for name in names if getattr(trainer, name) != getattr(server, name)]
    if trainer.rope_scaling != server.rope_scaling and "rope_theta" not in found:
        found.append("rope_theta")
    return found


def _field(evidence: Evidence, server: ServerState, name: str, gap: Gap, rest: Gap) -> Finding:
    cause, tensor = _NAMED.get(name, (Cause.MODEL, name))
    own, other = getattr(evidence.model, name), getattr(server.model, name)
    shown = f"{name}: the trainer has {own}, server {server.number} {other}; log-probs differ by {gap}"
    if name == "rope_theta" and evidence.model.rope_scaling != server.model.rope_scaling:
        shown += f"; rope_scaling: {evidence.model.rope_scaling} and {server.model.rope_scaling}"
    if rest != gap:
        shown += f", with what the server read by {rest}"
    where = Place(tensor, f"server {server.number}", gap.uid, gap.token)
    return Finding(cause, where, shown, detail=other)
