"""What a refit of SGLang servers moves: from which ranks to which workers, over which links, and how long at line rate.

From the layouts alone, by the routes of `weights.transports.spread_routes`. The bound is that of the busiest link, with
all links busy at once; what it takes to pack, to start a message and to cross switches is left out.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from mppo.megatron.model_config import ModelConfig
from mppo.megatron.stage_layers import layers_of_stages
from mppo.megatron.topology import Sizes
from mppo.planning.machines import Links, Machines, in_words, place
from mppo.trainer.run_spec import RunSpec
from mppo.weights.architectures import Architecture
from mppo.weights.megatron_layout import megatron_layout
from mppo.weights.sglang_layout import Worker, sglang_layout
from mppo.weights.spread import Share
from mppo.weights.transfer_plan import Layout
from mppo.weights.transports.spread_routes import SpreadRoutes


@dataclass(frozen=True)
class Range:
    """Over ranks or workers."""

    least: int
    mean: float
    most: int

    @classmethod
    def of(cls, numbers: Iterable[int]) -> "Range":
        found = list(numbers)
        return cls(min(found), sum(found) / len(found), max(found))


@dataclass(frozen=True)
class Traffic:
    """Of one rank or one worker."""

    within: int
    """Bytes over NVLink, to or from the same machine."""
    between: int
    """Bytes over the network card."""
    messages: int
    peers: int

    @property
    def bytes(self) -> int:
        return self.within + self.between


@dataclass(frozen=True)
class Bound:
    """Seconds at line rate, by link."""

    sender_nic: float
    """Of the busiest rank."""
    receiver_nic: float
    """Of the busiest worker."""
    nvlink: float
    """Of whoever has most to send or to receive within a machine."""
    whole: float
    """The slowest of them."""

    @classmethod
    def of(cls, senders: Iterable[Traffic], receivers: Iterable[Traffic], links: Links) -> "Bound":
        outgoing, incoming = list(senders), list(receivers)
        sender_nic = links.between_s(max(t.between for t in outgoing))
        receiver_nic = links.between_s(max(t.between for t in incoming))
        nvlink = links.within_s(max(t.within for t in outgoing + incoming))
        return cls(sender_nic, receiver_nic, nvlink, max(sender_nic, receiver_nic, nvlink))


@dataclass(frozen=True)
class Refit:
    """With whole weights; a delta is smaller by what did not change."""

    transport: str
    """As configured. What travels is given for `shards`; the bound for `broadcast` too."""
    servers: int
    workers: int
    """Of each server."""
    placement: str
    links: Links
    dtype: str
    """In which weights travel."""
    model_bytes: int
    bucket_bytes: int
    """Of a message at most."""
    sent: Range
    """Bytes of a rank."""
    messages: Range
    """Of a rank."""
    peers: Range
    """Workers to which a rank sends."""
    received: Range
    """Bytes of a worker."""
    minimum: Range
    """Bytes that a worker's parameters are."""
    received_over_minimum: float
    """Of the worker that receives most beyond need; 1: nothing travels that is not held."""
    senders_of_server: Range
    bytes_within: int
    bytes_between: int
    share_within: float
    """Of the bytes, those that stay within a machine."""
    bound_s: Bound
    broadcast_s: Bound
    """By way of the first rank, in a group with each server's workers."""
    ranks: list[Traffic]


def plan_refit(spec: RunSpec, architecture: Architecture, model: ModelConfig, links: Links) -> Refit:
    """Of the actor's weights to all servers. Raises ConfigError for a number of workers that SGLang would refuse."""
    own, ranks = spec.config.rollout.sglang, spec.config.parallel.model_parallel_size * spec.data_parallel_size
    source, target = _layouts(spec, architecture, model)
    routes = SpreadRoutes.of(source, target, own.buffer_mb << 20)
    servers, workers = len(routes.of_server), own.tensor_parallel_size
    machines = place(ranks, servers, workers, own.urls, links.gpus_per_machine)
    outgoing, incoming = _traffic(routes, machines, source, target)
    dtype = min((next(iter(x.tensors.values())).dtype for x in (source, target)), key=lambda d: d.itemsize)
    held, within, between = _held(target, dtype), sum(t.within for t in outgoing), sum(t.between for t in outgoing)
    whole = sum(prod(tensor.shape) for tensor in source.tensors.values()) * dtype.itemsize
    return Refit(
        transport=own.transport,
        servers=servers,
        workers=workers,
        placement=in_words(own.urls, ranks, links.gpus_per_machine),
        links=links,
        dtype=str(dtype).removeprefix("torch."),
        model_bytes=whole,
        bucket_bytes=routes.bucket_bytes,
        sent=Range.of(t.bytes for t in outgoing),
        messages=Range.of(t.messages for t in outgoing),
        peers=Range.of(t.peers for t in outgoing),
        received=Range.of(t.bytes for t in incoming),
        minimum=Range.of(held),
        received_over_minimum=max(t.bytes / least for t, least in zip(incoming, held, strict=True)),
        senders_of_server=Range.of(len({s.source for s in shares}) for shares in routes.of_server.values()),
        bytes_within=within,
        bytes_between=between,
        share_within=within / (within + between),
        bound_s=Bound.of(outgoing, incoming, links),
        broadcast_s=_broadcast(whole, machines, links),
        ranks=outgoing,
    )


def _layouts(spec: RunSpec, architecture: Architecture, model: ModelConfig) -> tuple[Layout, Layout]:
    """Of the trainer and of the servers, as a run has them."""
    config, own = spec.config, spec.config.rollout.sglang
    sizes = Sizes.of(config.parallel, spec.data_parallel_size)
    stages = tuple(tuple(map(tuple, chunks)) for chunks in layers_of_stages(model, config.parallel))
    rows = architecture.rows(model, False)
    source = megatron_layout(rows, model, sizes, stages, getattr(torch, config.model.dtype))
    target = sglang_layout(
        architecture,
        model,
        own.tensor_parallel_size,
        getattr(torch, config.rollout.dtype or config.model.dtype),
        ep=own.expert_parallel_size,
        servers=range(len(own.urls) or own.servers),
    )
    return source, target


def _traffic(
    routes: SpreadRoutes, machines: Machines, source: Layout, target: Layout
) -> tuple[list[Traffic], list[Traffic]]:
    """Of every rank and of every worker."""
    outgoing: dict[int, list[tuple[Share, bool, int]]] = defaultdict(list)
    incoming: dict[Worker, list[tuple[Share, bool, int]]] = defaultdict(list)
    for shares in routes.of_server.values():
        for share in shares:
            is_within = machines.is_within(share.source, share.target)
            found = share, is_within, sum(1 for _ in share.messages(routes.bucket_bytes))
            outgoing[share.source].append(found)
            incoming[share.target].append(found)
    return (
        [_summed(outgoing[rank], len({share.target for share, *_ in outgoing[rank]})) for rank in source.holdings],
        [_summed(incoming[w], len({share.source for share, *_ in incoming[w]})) for w in target.holdings],
    )


def _summed(found: list[tuple[Share, bool, int]], peers: int) -> Traffic:
    return Traffic(
        within=sum(share.bytes for share, is_within, _ in found if is_within),
        between=sum(share.bytes for share, is_within, _ in found if not is_within),
        messages=sum(messages for *_, messages in found),
        peers=peers,
    )


def _held(target: Layout, dtype: torch.dtype) -> list[int]:
    """Bytes of each worker's parameters, from their own shapes: no plan could bring less."""
    sizes = {}
    for holding in target.holdings.values():
        if id(holding) not in sizes:
            padding = 0
            for region in holding.padding:
                shape = list(holding.shapes[region.name])[region.index is not None :]
                padding += prod(shape) // shape[region.dim] * len(region)
            sizes[id(holding)] = dtype.itemsize * (sum(map(prod, holding.shapes.values())) - padding)
    return [sizes[id(holding)] for holding in target.holdings.values()]


def _broadcast(whole: int, machines: Machines, links: Links) -> Bound:
    """Each worker receives the whole model, and the first rank sends it once to each server, whose workers pass it on.

    How it comes to the first rank is left out: no link is busier with that than with the way to a server.
    """
    first = machines.of_rank[0]
    leaders = [machine for worker, machine in machines.of_worker.items() if worker.tp_rank == 0]
    near = sum(machine == first for machine in leaders)
    out = Traffic(within=near * whole, between=(len(leaders) - near) * whole, messages=0, peers=0)
    own = [machine == first for machine in machines.of_worker.values()]
    into = [Traffic(within=whole * near, between=whole * (not near), messages=0, peers=0) for near in own]
    return Bound.of([out], into, links)
