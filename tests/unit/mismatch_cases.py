"""Evidence that follows from a model of a few numbers, without any disagreement, and ways to make some."""

import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mppo.batch.trajectory import Span, TrajectoryId
from mppo.megatron.model_config import ModelConfig
from mppo.mismatch.diagnosis import diagnose
from mppo.mismatch.evidence import Bucket, Call, Evidence, Expected, Scored, ServerState
from mppo.mismatch.finding import Cause
from mppo.mismatch.hypotheses import Change, Head, Likelihoods
from mppo.rollout.engines.contract import SamplingParams
from mppo.weights.checksums import checksum

VOCABULARY, VERSION = 40, 3
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=2,
    ffn_hidden_size=8,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=False,
)
QKV, DOWN, EMBEDDING = (
    "0/layers.0.self_attn.qkv_proj.weight",
    "0/layers.0.down_proj.weight",
    "0/model.embed_tokens.weight",
)
HEAD = "0/lm_head.weight"


@dataclass
class Numbers:
    """A trainer: logits `[L, V]` of each trajectory, and how they move with what may be changed."""

    logits: list[Tensor]
    ids: list[Tensor]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    model: ModelConfig = MODEL
    passes: int = 0

    def score(self, change: Change) -> list[Tensor]:
        self.passes += 1
        return [self._score(z, ids, change) for z, ids in zip(self.logits, self.ids, strict=True)]

    def _score(self, z: Tensor, ids: Tensor, change: Change) -> Tensor:
        own = torch.log_softmax(self.logits_under(z, change), -1).gather(1, ids[:, None]).squeeze(1)
        own[0] = 0.0
        return own

    def logits_under(self, z: Tensor, change: Change) -> Tensor:
        draw = torch.Generator().manual_seed(len(z))
        directions = torch.randn(3, *z.shape, generator=draw)
        theta, eps = change.rope_theta or self.model.rope_theta, change.rms_norm_eps or self.model.rms_norm_eps
        z = z + directions[0] * torch.tensor(theta / self.model.rope_theta).log()
        z = z + directions[1] * 1e3 * (eps - self.model.rms_norm_eps)
        if change.head is Head.EMBEDDING:
            z = z + directions[2]
        z = z / change.temperature
        if change.head is Head.BFLOAT16:
            z = z.bfloat16().float()
        return torch.cat([z, torch.zeros(len(z), 24)], 1) if change.head is Head.PADDED else z

    def likelihoods(self, temperature: float, k: int = 0) -> Likelihoods:
        found = Likelihoods([], [], [])
        for z, ids in zip(self.logits, self.ids, strict=True):
            p = torch.softmax(z / temperature, -1)
            own = p.gather(1, ids[:, None])
            found.mass.append(torch.where(p >= own, p, 0.0).sum(1))
            found.rank.append((p >= own).sum(1).float())
            found.top.append(p.topk(k, dim=1).values.sum(1))
        return found

    def parameter(self, name: str) -> Tensor:
        return self.parameters[name]


@dataclass
class Case:
    """Evidence without any disagreement, and what makes more of it."""

    evidence: Evidence
    numbers: Numbers

    def causes(self) -> list[Cause]:
        return [finding.cause for finding in diagnose(self.evidence, self.numbers)]

    def the_finding(self):
        (finding,) = diagnose(self.evidence, self.numbers)
        return finding

    def with_each(self, change) -> "Case":
        """`change(scored, number)` gives the fields of a trajectory that are otherwise."""
        trajectories = tuple(replace(s, **change(s, n)) for n, s in enumerate(self.evidence.trajectories))
        return replace(self, evidence=replace(self.evidence, trajectories=trajectories))

    def with_server(self, **changes) -> "Case":
        return replace(self, evidence=replace(self.evidence, servers=(replace(self.evidence.servers[0], **changes),)))

    def reported(self, log_probs: list[Tensor], **asked) -> "Case":
        """The engine said these when it wrote."""

        def change(scored: Scored, number: int):
            call, own = scored.calls[0], log_probs[number]
            call = replace(call, log_probs=tuple(own[call.start :].tolist()), asked=replace(call.asked, **asked))
            return {"calls": (call,), "rollout_log_probs": torch.where(scored.action_mask, own, 0.0)}

        return self.with_each(change)

    def engine_is(self, change: Change) -> "Case":
        """The engine computes as the trainer would if it were changed."""
        scores = self.numbers.score(change)

        def of(scored: Scored, number: int):
            prefill = scores[number].clone()
            prefill[0] = torch.nan
            return {"prefill": prefill, "salted": torch.where(scored.salted.isnan(), torch.nan, prefill)}

        return self.with_each(of).reported(scores)


def clean(
    seed: int, *, model: ModelConfig = MODEL, temperature: float = 1.0, kept: float = 1.0, k: int = VOCABULARY
) -> Case:
    """Trajectories of one turn, drawn among the `k` likeliest tokens, and those with the probability `kept`."""
    draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
    numbers = Numbers([], [], model=model)
    starts = []
    for _ in range(6):
        start, written = draw.randrange(3, 9), draw.randrange(12, 20)
        z = torch.randn(start + written, VOCABULARY, generator=torch_draw)
        p = torch.softmax(z / temperature, -1)
        ordered, order = p.sort(-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < kept, ordered, 0.0)
        ordered[:, k:] = 0.0
        ids = order.gather(1, torch.multinomial(ordered, 1, generator=torch_draw)).squeeze(1)
        numbers.logits.append(z)
        numbers.ids.append(ids)
        starts.append(start)
    reference, at_temperature = numbers.score(Change()), numbers.score(Change(temperature=temperature))
    asked = SamplingParams(max_new_tokens=20, temperature=temperature)
    trajectories = []
    for number, (start, ids) in enumerate(zip(starts, numbers.ids, strict=True)):
        mask = torch.arange(len(ids)) >= start
        prefill = reference[number].clone()
        prefill[0] = torch.nan
        written, spans = tuple(ids[start:].tolist()), (Span(0, len(ids) - start, VERSION),)
        log_probs = tuple(at_temperature[number][start:].tolist())
        trajectories.append(
            Scored(
                uid=TrajectoryId(number, 0),
                token_ids=ids,
                action_mask=mask,
                rollout_log_probs=torch.where(mask, at_temperature[number], 0.0),
                calls=(Call(0, tuple(ids[:start].tolist()), written, log_probs, spans, start - 1, asked),),
                prefill=prefill,
                salted=torch.where(mask, prefill, torch.nan),
                trained=torch.where(mask, at_temperature[number], 0.0),
                reference=reference[number],
            )
        )
    for name, rows in ((QKV, 16), (DOWN, 8), (EMBEDDING, 64), (HEAD, 64)):
        numbers.parameters[name] = torch.randn(rows, 8, generator=torch_draw)
    sums = {name: checksum(tensor) for name, tensor in numbers.parameters.items()}
    before = {name: checksum(tensor + 1) for name, tensor in numbers.parameters.items()}
    buckets = (Bucket("message 1", 0, frozenset({QKV, DOWN})), Bucket("message 2", 0, frozenset({EMBEDDING, HEAD})))
    evidence = Evidence(
        trajectories=tuple(trajectories),
        servers=(ServerState(0, "http://here", str(VERSION), sums, before, model),),
        expected=Expected(sums, frozenset({EMBEDDING, HEAD}), buckets),
        version=VERSION,
        model=model,
        temperature=temperature,
        tolerance=5e-4,
    )
    return Case(evidence, numbers)
