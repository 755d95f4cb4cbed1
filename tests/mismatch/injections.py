"""Fourteen causes, each put into a real server or a real trainer; what the diagnosis must name is beside each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.batch.trajectory import Span, Trajectory, TrajectoryId, Turn
from mppo.mismatch.finding import Cause, Finding, Place
from mppo.mismatch.gathering import buckets_of
from mppo.rollout.agents.session import Session
from mppo.rollout.prompts import Prompt
from mppo.weights.transports.worker_link import LastSent
from tests.mismatch.world import World

QKV, DOWN = "model.layers.2.self_attn.qkv_proj.weight", "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Injected:
    cause: Cause
    where: str | Callable[[Place], bool]
    """The tensor that must be named, or whether a token is right."""
    findings: list[Finding]

    @property
    def named(self) -> bool:
        """The cause alone, with its tensor or token, and nothing else."""
        return len(self.findings) == 1 and self.findings[0].cause is self.cause and self._is_there

    @property
    def _is_there(self) -> bool:
        place: Place = self.findings[0].place
        if isinstance(self.where, str):
            return place.tensor == self.where
        return place.trajectory is not None and place.token is not None and self.where(place)


def _written(world: World, first: int = 0, last: int = 19) -> Callable[[Place], bool]:
    """Whether a token is one of those that the engine wrote, or those from number `first` to `last` of them."""

    def is_there(place: Place) -> bool:
        start = len(world.prompts[place.trajectory.prompt].token_ids)
        return start + first <= place.token <= start + last

    return is_there


def stale_tensor(world: World) -> Injected:
    """One parameter keeps what the refit before brought."""
    world.heal()
    old = world.expected(DOWN)
    world.new_weights()
    world.refit()
    world.write({DOWN: old})
    return Injected(Cause.STALE_TENSOR, DOWN, world.diagnose()[0])


def swapped_qkv(world: World) -> Injected:
    """The two key/value heads, with their queries, change places."""
    whole, model = world.expected(QKV), world.trainer.model.config
    queries = model.num_attention_heads // model.num_query_groups * model.head_dim
    parts = whole.split([queries, queries, *[model.head_dim] * 4])
    world.write({QKV: torch.cat([parts[i] for i in (1, 0, 3, 2, 5, 4)])})
    return Injected(Cause.SWAPPED_QKV, QKV, world.diagnose()[0])


class _Lossy(LastSent):
    """Says of what one message carries that nothing changed: it travels empty."""

    def __init__(self, lost):
        super().__init__()
        self.lost = {send.read for send in lost.sends}

    def changed(self, send, now):
        found = super().changed(send, now)
        return found[:0] if send.read in self.lost else found


def lost_bucket(world: World) -> Injected:
    """One message of a refit carries nothing."""
    delivery = world.sides.engine.refitter.delivery
    message = delivery.routes[0].rounds[1][0]
    kept, delivery.last = delivery.last, _Lossy(message)
    delivery.last._slices = kept._slices
    world.new_weights()
    world.refit()
    delivery.last = kept
    bucket = next(b for b in buckets_of(world.sides.engine, world.sides.target) if b.name.startswith("message 2 "))
    found = world.diagnose()[0]
    first = next((f.place.tensor for f in found if f.detail == bucket.name), None)
    return Injected(Cause.LOST_BUCKET, first or "the bucket", found)


def padding(world: World) -> Injected:
    """Rows beyond the vocabulary are not zero."""
    whole = world.expected(EMBEDDING)
    whole[world.trainer.model.config.vocab_size :] = 1.0
    world.write({EMBEDDING: whole})
    return Injected(Cause.PADDING, EMBEDDING, world.diagnose()[0])


def wrong_version(world: World) -> Injected:
    """The server says an old number."""
    world.post("/update_weight_version", {"new_version": str(world.version - 1), "abort_all_requests": False})
    return Injected(Cause.VERSION, _written(world, 0, 0), world.diagnose()[0])


def stale_prefix(world: World) -> Injected:
    """Other weights under the same version, and prefixes that were read under those before."""
    world.diagnose()
    world.new_weights()
    world.version -= 1
    world.refit()
    return Injected(Cause.STALE_PREFIX, _written(world, 0, 5), world.diagnose()[0])


def temperature(world: World) -> Injected:
    """Tokens are drawn at another temperature than was asked for."""
    with world.client_that_asks(temperature=0.7) as sides:
        return Injected(Cause.TEMPERATURE, _written(world), world.diagnose(sides)[0])


def top_p(world: World) -> Injected:
    """Tokens are drawn among the likeliest, and reported with the log-probs of all."""
    with world.client_that_asks(top_p=0.7) as sides:
        return Injected(Cause.TOP_P, _written(world), world.diagnose(sides)[0])


def retokenised(world: World) -> Injected:
    """An agent of two turns writes its first answer as text, and tokenises it again."""
    tokenizer = world.trainer.model.tokenizer
    changed: dict[TrajectoryId, int] = {}

    async def agent(prompt: Prompt, session: Session) -> list[Trajectory]:
        first = await session.complete(prompt.token_ids)
        text = tokenizer.decode(list(first.token_ids), skip_special_tokens=True)
        again = tuple(tokenizer.encode(text, add_special_tokens=False))
        padded = [*again, *[-1] * len(first.token_ids)][: len(first.token_ids)]
        pairs = zip(first.token_ids, padded, strict=True)
        at = next((number for number, (x, y) in enumerate(pairs) if x != y), None)
        if at is not None:
            changed[session.uid] = len(prompt.token_ids) + at
        before = (*prompt.token_ids, *again, 10)
        second = await session.complete(before, turn=1)
        ids = (*before, *second.token_ids)
        log_probs, mask = torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.bool)
        start, kept = len(prompt.token_ids), min(len(again), len(first.log_probs))
        log_probs[start : start + kept] = torch.tensor(first.log_probs[:kept])
        log_probs[len(before) :] = torch.tensor(second.log_probs)
        mask[start : start + len(again)] = True
        mask[len(before) :] = True
        turns = (Turn(start, start + len(again)), Turn(len(before), len(ids)))
        spans = tuple(Span(turn.start, turn.stop, world.version) for turn in turns)
        return [Trajectory(session.uid, torch.tensor(ids), mask, log_probs, spans, turns)]

    found = world.diagnose(replace(world.sides, agent=agent))[0]
    return Injected(
        Cause.RETOKENISED, lambda place: place.token == changed.get(place.trajectory) and place.turn == 1, found
    )


def shifted_mask(world: World) -> Injected:
    """Actions begin one token early."""

    async def agent(prompt: Prompt, session: Session) -> list[Trajectory]:
        right = session.trajectory(prompt.token_ids, await session.complete(prompt.token_ids))
        return [replace(right, action_mask=torch.roll(right.action_mask, -1))]

    found = world.diagnose(replace(world.sides, agent=agent))[0]
    return Injected(Cause.MASK, _written(world, -1, -1), found)


class _DenseBfloat16Head:
    """Logits as a bfloat16 linear layer makes them, whole."""

    temperature = 1.0

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, output, labels, names):
        weight = output.weight[: self.vocab_size]
        logits = torch.nn.functional.linear(output.hidden.bfloat16(), weight.bfloat16()).float()
        log_probs = torch.log_softmax(logits, -1).gather(1, labels[:, None]).squeeze(1)
        return _Output(log_probs)


@dataclass
class _Output:
    log_probs: Tensor


def bfloat16_head(world: World) -> Injected:
    """The trainer's own output layer works in bfloat16."""
    head = _DenseBfloat16Head(world.trainer.model.config.vocab_size)
    sides = replace(world.sides, trainer=replace(world.trainer, head=head))
    return Injected(Cause.BF16_HEAD, "lm_head.weight", world.diagnose(sides)[0])


def _other_model(world: World, cause: Cause, tensor: str, field: str, *, hidden: bool) -> Injected:
    """A trainer of another configuration, whose weights the server gets."""
    world.heal()
    trainer = world.other_trainer(f"++model.preset_options.{field}")
    world.refit(trainer)
    return Injected(cause, tensor, world.diagnose(replace(world.sides, trainer=trainer), hidden=hidden)[0])


def rope_base(world: World) -> Injected:
    """The server read another base."""
    field = "rope_parameters={rope_type: default, rope_theta: 500000.0}"
    return _other_model(world, Cause.ROPE, "rotary_emb.inv_freq", field, hidden=False)


def hidden_rope_base(world: World) -> Injected:
    """The same, of a server whose folder cannot be read."""
    field = "rope_parameters={rope_type: default, rope_theta: 37000.0}"
    return _other_model(world, Cause.ROPE, "rotary_emb.inv_freq", field, hidden=True)


def epsilon(world: World) -> Injected:
    """The server read another epsilon, and its folder cannot be read."""
    tensor = "model.layers.0.input_layernorm.weight"
    return _other_model(world, Cause.EPSILON, tensor, "rms_norm_eps=1.0e-3", hidden=True)


def untied_head(world: World) -> Injected:
    """The trainer has an output layer of its own; the server ties it to the embedding."""
    return _other_model(world, Cause.UNTIED_HEAD, "lm_head.weight", "tie_word_embeddings=false", hidden=True)


def padding_in_softmax(world: World) -> Injected:
    """The trainer's softmax is over rows of padding too."""
    head = replace(world.trainer.head, vocab_size=world.trainer.model.config.padded_vocab_size(1))
    sides = replace(world.sides, trainer=replace(world.trainer, head=head))
    return Injected(Cause.PADDING, "lm_head.weight", world.diagnose(sides)[0])


def trained_temperature(world: World) -> Injected:
    """The trainer divides its logits by another temperature than tokens are sampled at."""
    sides = replace(world.sides, trainer=replace(world.trainer, head=replace(world.trainer.head, temperature=1.3)))
    return Injected(Cause.TEMPERATURE, _written(world), world.diagnose(sides)[0])


def wrong_tensor(world: World) -> Injected:
    """Something else is written than any refit brought."""
    world.write({DOWN: world.expected(DOWN) + 0.01})
    return Injected(Cause.WRONG_TENSOR, DOWN, world.diagnose()[0])


def top_k(world: World) -> Injected:
    """Tokens are drawn among the ten likeliest."""
    with world.client_that_asks(top_k=10) as sides:
        return Injected(Cause.TOP_K, _written(world), world.diagnose(sides)[0])


FOURTEEN: dict[str, Callable[[World], Injected]] = {
    "a stale tensor": stale_tensor,
    "a swapped QKV group": swapped_qkv,
    "a stale prefix": stale_prefix,
    "wrong temperature": temperature,
    "a re-tokenised turn": retokenised,
    "top-p": top_p,
    "a bf16 head": bfloat16_head,
    "an off-by-one mask": shifted_mask,
    "wrong version": wrong_version,
    "vocabulary padding": padding,
    "rope base": rope_base,
    "an untied head": untied_head,
    "a lost bucket": lost_bucket,
    "a norm's epsilon": epsilon,
}
MORE: dict[str, Callable[[World], Injected]] = {
    "rope base, unreadable": hidden_rope_base,
    "padding in the trainer's softmax": padding_in_softmax,
    "another temperature in training": trained_temperature,
    "a wrong tensor": wrong_tensor,
    "top-k": top_k,
}
"""The same causes by other ways, and their neighbours; they are not counted."""
