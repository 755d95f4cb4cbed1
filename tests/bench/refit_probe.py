"""What one refit took: seconds of its parts on every rank, what each worker received, memory beside the model."""

import asyncio
import os
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.megatron.collectives import gather_from_all
from mppo.rollout.engines.sglang.deliveries import Delivery, Order, Refit
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.fleet import Member
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transfer_plan import Layout
from mppo.weights.transports.routes import Route
from tests.bench.namespace import bytes_on_the_link
from tests.bench.processes import Memory, return_freed_memory

Span = tuple[float, float]


@dataclass
class TimedDelivery:
    """A delivery that notes when its parts began and ended, on the clock that all processes of a machine share."""

    inner: Delivery
    preparing: list[Span] = field(default_factory=list)
    moving: list[Span] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def prepare(self, weights: LiveWeights, refit: Refit) -> None:
        start = monotonic()
        await self.inner.prepare(weights, refit)
        self.preparing.append((start, monotonic()))

    async def send(self, weights: LiveWeights, orders: Sequence[Order], refit: Refit) -> Mapping[int, str]:
        start = monotonic()
        faults = await self.inner.send(weights, orders, refit)
        self.moving.append((start, monotonic()))
        return faults

    async def take(self, member: Member, order: Order, refit: Refit) -> None:
        start = monotonic()
        await self.inner.take(member, order, refit)
        self.moving.append((start, monotonic()))

    def seconds(self) -> float:
        """Collective: from the first rank that begins to the last that ends, of both parts; then they are forgotten.

        What the first rank says to a server between the two is no part of it.
        """
        found = gather_from_all((self.preparing, self.moving))
        self.preparing, self.moving = [], []
        parts = ([span for of_rank in found for span in of_rank[part]] for part in (0, 1))
        return sum(max(end for _, end in spans) - min(start for start, _ in spans) for spans in parts if spans)


@dataclass(frozen=True)
class Measured:
    """One refit."""

    seconds: float
    """Of all of it: pause, session, transfer, prefix cache, version, continue."""
    transfer_seconds: float
    """Of the delivery alone, until the last worker said that it took it in."""
    link_bytes: int
    """All that went over the loopback device, with headers, between whomever."""
    received: dict[int, int] = field(default_factory=dict)
    """Bytes, as each worker counted them; of transports whose receiver is mppo's."""


class Probe:
    """Around an engine of one server, on every rank."""

    def __init__(self, engine: SglangEngine, weights: LiveWeights, workers: Sequence[int]):
        """`workers` are the process ids of the server's, on the first rank. From here on memory counts."""
        self.engine, self.weights, self.version = engine, weights, 0
        self.delivery = TimedDelivery(engine.refitter.delivery)
        engine.refitter.delivery = self.delivery
        if engine.refitter.conductor is not None:
            engine.refitter.conductor.delivery = self.delivery
        return_freed_memory()
        self.own_memory = Memory(os.getpid())
        self.worker_memory = [Memory(pid) for pid in workers]

    def refit(self) -> Measured:
        """Collective."""
        self.version += 1
        dist.barrier()
        before, start = bytes_on_the_link(), monotonic()
        asyncio.get_event_loop().run_until_complete(self.engine.update_weights(self.weights, self.version))
        seconds = max(gather_from_all(monotonic() - start))
        sent = bytes_on_the_link() - before
        transfer = self.delivery.seconds()
        received = {worker.tp_rank: size for worker, size in getattr(self.delivery, "received", {}).items()}
        return gather_from_all(Measured(seconds, transfer, sent, received))[0]

    def peaks(self) -> tuple[int, int]:
        """Collective: the most bytes that a rank and that a worker took, since this was asked last."""
        peaks = (self.own_memory.peak_bytes(), [memory.peak_bytes() for memory in self.worker_memory])
        return_freed_memory()
        for memory in (self.own_memory, *self.worker_memory):
            memory.forget_peak()
        found = gather_from_all(peaks)
        return max(own for own, _ in found), max(found[0][1])


def least_bytes(target: Layout) -> dict[int, int]:
    """By worker: its parameters without padding, once."""
    size = next(iter(target.tensors.values())).dtype.itemsize
    found = {}
    for worker, holding in target.holdings.items():
        entries = sum(prod(shape) for shape in holding.shapes.values())
        padding = (r.view({r.name: torch.empty(holding.shapes[r.name], device="meta")}) for r in holding.padding)
        found[worker.tp_rank] = size * (entries - sum(part.numel() for part in padding))
    return found


@torch.no_grad()
def change(weights: LiveWeights, share: float, route: Route, seed: int) -> dict[int, int]:
    """Collective: change the last bit of so large a share of the entries, anywhere; how many of each worker's changed.

    Replicas of a tensor change alike. What a worker has to get follows from a comparison with the values before.
    """
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    for name, tensor in weights.tensors.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor.view(torch.int16).bitwise_xor_(chosen.to(torch.int16))
    counts: Counter[int] = Counter()
    for message in (m for messages in route.rounds for m in messages if m.source == weights.rank):
        for send in message.sends:
            counts[message.worker.tp_rank] += changed(send.read.view(before), send.read.view(weights.tensors))
    return dict(sum(gather_from_all(counts), Counter()))


def changed(before: Tensor, now: Tensor) -> int:
    """Entries of other bits."""
    return int(before.view(torch.int16).ne(now.view(torch.int16)).sum())
