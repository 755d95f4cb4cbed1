"""What the checksums of the workers' parameters say."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from mppo.megatron.model_config import ModelConfig
from mppo.mismatch.evidence import Bucket, Evidence, ServerState
from mppo.mismatch.finding import Cause, Finding, Place
from mppo.mismatch.hypotheses import Hypotheses
from mppo.weights.checksums import checksum

LARGEST_SEARCH = 4 << 30
"""Bytes that are hashed to find in which order a parameter's heads are."""
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SHOWN = 8
"""Tensors that are named one by one."""


def differing(evidence: Evidence, server: ServerState) -> list[str]:
    """`<tp rank>/<parameter>` of a server that are not as the plan says, in its order; none where there are no
    checksums."""
    if not server.checksums or not evidence.expected.checksums:
        return []
    expected = evidence.expected.checksums
    extra = [name for name in server.checksums if name not in expected]
    return [name for name in expected if server.checksums.get(name) != expected[name]] + extra


def weight_findings(evidence: Evidence, hypotheses: Hypotheses, agrees: Sequence[int]) -> list[Finding]:
    """`agrees` are the servers whose log-probs are the trainer's nevertheless."""
    found: list[Finding] = []
    for server in evidence.servers:
        left = differing(evidence, server)
        for look in (_untied, _padding, _swapped, _lost, _other, _stale):
            of_look, left = look(evidence, server, left, hypotheses, server.number in agrees)
            found += of_look
    return found


_Looked = tuple[list[Finding], list[str]]


def place(server: ServerState, key: str) -> Place:
    rank, name = key.split("/", 1)
    return Place(tensor=name, worker=f"server {server.number}, worker {rank}")


def _untied(evidence: Evidence, server: ServerState, left: list[str], hypotheses: Hypotheses, agrees: bool) -> _Looked:
    """An output layer of its own that is not the embedding, in a model that ties them."""
    found, rest = [], []
    for key in left:
        rank, name = key.split("/", 1)
        own, embedding = server.checksums.get(key), server.checksums.get(f"{rank}/{EMBEDDING}")
        if name == OUTPUT and evidence.model.tie_word_embeddings and own is not None and own != embedding:
            shown = f"its checksum is {own}, that of {EMBEDDING}, which it is tied to, {embedding}"
            found.append(Finding(Cause.UNTIED_HEAD, place(server, key), shown))
        else:
            rest.append(key)
    return found, rest


def _padding(evidence: Evidence, server: ServerState, left: list[str], hypotheses: Hypotheses, agrees: bool) -> _Looked:
    """Padded parameters alone differ, and no log-prob does, though each row that counts of tied or output layers
    would show."""
    if not left or not agrees or not evidence.expected.padded.issuperset(left):
        return [], left
    found = []
    for key in left:
        counts_all = evidence.model.tie_word_embeddings or key.endswith(OUTPUT)
        shown = (
            f"checksum {server.checksums.get(key)}, expected {evidence.expected.checksums.get(key)}, but no log-prob"
            " differs: rows of padding are not zero"
        )
        alternatives = () if counts_all else (Cause.STALE_TENSOR,)
        found.append(Finding(Cause.PADDING, place(server, key), shown, proved=counts_all, or_else=alternatives))
    return found, []


def _swapped(evidence: Evidence, server: ServerState, left: list[str], hypotheses: Hypotheses, agrees: bool) -> _Looked:
    """What the parameter holds is what it is to hold, with heads in another order."""
    found, rest = [], []
    budget = LARGEST_SEARCH
    for key in left:
        order = None
        if ".qkv_proj." in key and key in evidence.expected.checksums and budget > 0:
            whole = hypotheses.parameter(key)
            order = _order_of(server.checksums.get(key), whole, evidence.model, budget)
            budget -= LARGEST_SEARCH // 8
        if order is None:
            rest.append(key)
        else:
            shown = f"checksum {server.checksums[key]} is that of the expected tensor with {order}"
            found.append(Finding(Cause.SWAPPED_QKV, place(server, key), shown, detail=order))
    return found, rest


def _order_of(found: str | None, whole: Tensor, model: ModelConfig, budget: int) -> str | None:
    for order, tensor in orders(whole, model):
        budget -= tensor.nbytes
        if budget < 0:
            return None
        if checksum(tensor) == found:
            return order
    return None


def orders(whole: Tensor, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Of a worker's merged QKV `[q + k + v rows, ...]`: what it would be with heads in other orders, the likeliest
    first."""
    head, per_group = model.head_dim, model.num_attention_heads // model.num_query_groups
    groups = len(whole) // ((per_group + 2) * head)
    if not groups or groups * (per_group + 2) * head != len(whole):
        return  # workers share key/value heads
    q, k, v = whole.split([groups * per_group * head, groups * head, groups * head])
    parts = {"q": q, "k": k, "v": v}
    stacked = {name: part.reshape(groups, -1, *whole.shape[1:]) for name, part in parts.items()}
    by_group = torch.cat([stacked[name] for name in "qkv"], dim=1)
    yield "its rows by group, as Megatron has them", by_group.reshape(whole.shape)
    yield "keys and values swapped", torch.cat([q, v, k])
    for one, other in combinations(range(groups), 2):
        for names in ("qkv", "kv", "q", "k", "v"):
            swapped = [_swap(stacked[n], one, other) if n in names else stacked[n] for n in "qkv"]
            text = f"groups {one} and {other} of {', '.join(names)} swapped"
            yield text, torch.cat([part.reshape(-1, *whole.shape[1:]) for part in swapped])
    heads = q.reshape(groups * per_group, head, *whole.shape[1:])
    for one, other in combinations(range(groups * per_group), 2):
        yield f"query heads {one} and {other} swapped", torch.cat([_swap(heads, one, other).reshape(q.shape), k, v])


def _swap(x: Tensor, one: int, other: int) -> Tensor:
    order = list(range(len(x)))
    order[one], order[other] = other, one
    return x[order]


def _lost(evidence: Evidence, server: ServerState, left: list[str], hypotheses: Hypotheses, agrees: bool) -> _Looked:
    """What differs is what one bucket had to change."""
    expected, missing = evidence.expected.checksums, set(left)
    buckets = [b for b in evidence.expected.buckets if b.server == server.number]
    suspects = [b for b in buckets if missing and missing == _shows(b, server, expected)]
    if not suspects or len(missing) == 1:
        return [], left
    names = " or ".join(bucket.name for bucket in suspects)
    shown = f"{len(left)} parameters differ, exactly those that {names} had to change: {_listed(left)}"
    return [Finding(Cause.LOST_BUCKET, place(server, left[0]), shown, detail=names)], []


def _shows(bucket: Bucket, server: ServerState, expected: Mapping[str, str]) -> set[str]:
    """The parameters that would differ if it was lost: what is as before needed no bucket."""
    return {name for name in bucket.parameters if server.before.get(name) != expected.get(name)}


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _other(evidence: Evidence, server: ServerState, left: list[str], hypotheses: Hypotheses, agrees: bool) -> _Looked:
    """Most of the model differs: there is nothing to say of single tensors."""
    count = len(evidence.expected.checksums)
    if len(left) <= max(1, count // 2):
        return [], left
    as_before = all(server.checksums.get(key) == server.before.get(key) for key in left)
    how = "; all are as before the refit" if as_before else ""
    shown = f"{len(left)} of {count} parameters differ{how}: {_listed(left)}"
    return [Finding(Cause.OTHER_WEIGHTS, place(server, left[0]), shown)], []


def _stale(evidence: Evidence, server: ServerState, left: list[str], hypotheses: Hypotheses, agrees: bool) -> _Looked:
    found = []
    for key in left[:SHOWN]:
        own, expected, before = (x.get(key) for x in (server.checksums, evidence.expected.checksums, server.before))
        shown = f"checksum {own}, expected {expected}"
        more = f" ({len(left)} in all)" if len(left) > SHOWN else ""
        if own is not None and own == before:
            alone = [b for b in evidence.expected.buckets if len(left) == 1 and b.parameters == {key}]
            others = (Cause.LOST_BUCKET,) if alone else ()
            text = f"{shown}; it is as before the refit{more}"
            found.append(Finding(Cause.STALE_TENSOR, place(server, key), text, or_else=others))
        elif before is None:
            found.append(
                Finding(Cause.STALE_TENSOR, place(server, key), shown + more, False, or_else=(Cause.WRONG_TENSOR,))
            )
        else:
            found.append(Finding(Cause.WRONG_TENSOR, place(server, key), f"{shown}, before the refit {before}{more}"))
    return found, []
