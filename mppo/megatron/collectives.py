"""The few collectives of the control plane, each called by every rank whatever it holds."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

from mppo.algorithm.reduction import Reduction
from mppo.algorithm.statistics import Ratio
from mppo.errors import MppoError
from mppo.megatron import platform
from mppo.megatron.topology import Topology

WIDTH = 256
"""Columns of a field of vectors that are exchanged at a time."""


def _reduced(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce a copy of `x`, which stays where it was."""
    result = x.to(platform.device()).clone()
    dist.all_reduce(result, op, group)
    return result.to(x.device)


def data_parallel_reduction(topology: Topology) -> Reduction:
    """Of numbers about a data-parallel rank's part of the batch."""
    group = topology.dp_group

    def gathered(x: Tensor) -> Tensor:
        sizes = [torch.zeros(1, dtype=torch.long, device=platform.device()) for _ in range(topology.dp)]
        dist.all_gather(sizes, torch.full_like(sizes[0], len(x)), group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=x.dtype, device=platform.device())
        padded[: len(x)] = x
        pieces = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(pieces, padded, group)
        return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)]).to(x.device)

    return Reduction(
        sum=lambda x: _reduced(x, group), max=lambda x: _reduced(x, group, dist.ReduceOp.MAX), gather=gathered
    )


def sum_with_gradient(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """A sum over the group through which gradients flow: `Segments.combine` where trajectories are cut over ranks.

    Each rank's loss depends on the sums, so the gradients of all ranks add up on the way back.
    """
    return partial(torch.distributed.nn.functional.all_reduce, group=group)


def join_slices(x: Tensor, topology: Topology) -> Tensor:
    """`[T, ...]` of which each context-parallel rank has its own positions, and 0 elsewhere -> all of it."""
    return x if topology.cp == 1 else _reduced(x, topology.cp_group)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first `sent[0]` rows of `x [N, ...]` go to rank 0 of the group, the next `sent[1]` to rank 1, and so on.

    Returns the rows that come here, `received[r]` of them from rank r, in order of rank. They travel as bytes, so that
    any dtype does; what stays does not travel, and of wide rows only WIDTH columns at a time are on the device.
    """
    if x.dim() > 1 and x.size(1) > WIDTH:
        return torch.cat([exchange_rows(columns, sent, received, group) for columns in x.split(WIDTH, dim=1)], dim=1)
    me, pieces = group.rank(), list(x.split(sent))
    here, pieces[me] = pieces[me], x[:0]
    sizes = [0 if rank == me else size for rank, size in enumerate(received)]
    rows = torch.cat(pieces).unsqueeze(-1).view(torch.uint8).to(platform.device())
    arrived = rows.new_empty(sum(sizes), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, sizes, [len(piece) for piece in pieces], group)
    coming = list(arrived.view(x.dtype).squeeze(-1).to(x.device).split(sizes))
    coming[me] = here
    return torch.cat(coming)


def from_last_stage(x: Tensor | None, like: Tensor, topology: Topology) -> Tensor:
    """Give every pipeline stage what the last one holds; `like` has its shape and dtype."""
    if topology.pp == 1:
        return x
    value = x if topology.is_last_stage else torch.empty_like(like)
    value = value.to(platform.device())
    dist.broadcast(value, topology.last_stage_rank, group=topology.pp_group)
    return value.to(like.device)


def reduce_statistics(statistics: dict[str, Ratio], topology: Topology) -> dict[str, Ratio]:
    """Metrics of a mini-batch, exact over the global batch: one all-reduce over DP x CP, one broadcast over PP.

    Every rank of that group must bring the same names.
    """
    reduced: list[dict[str, Ratio]] = [{}]
    if topology.is_last_stage:
        names = sorted(statistics)
        table = torch.stack([torch.stack([statistics[n].numerator, statistics[n].denominator]) for n in names])
        table = _reduced(table, topology.dp_cp_group).cpu()
        reduced = [
            {n: replace(statistics[n], numerator=r[0], denominator=r[1]) for n, r in zip(names, table, strict=True)}
        ]
    if topology.pp > 1:
        dist.broadcast_object_list(reduced, topology.last_stage_rank, group=topology.pp_group)
    return reduced[0]


def gather_from_all(item: Any) -> list[Any]:
    """One Python object of each rank of the world, on every rank, in rank order."""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise on every rank the first MppoError that any of them raised inside, so that none waits for another."""
    mine = None
    try:
        yield
    except MppoError as error:
        mine = error
    failed = _reduced(torch.tensor(int(mine is not None)), dist.group.WORLD, dist.ReduceOp.MAX)
    if failed:
        first = next(error for error in gather_from_all(mine) if error is not None)
        first.on_every_rank = True
        raise first


def exchange(parts: list[list[Any]], part_of: list[int]) -> list[Any]:
    """The items of `parts[part_of[r]]` go to rank r; returns what all ranks sent here, in rank order.

    Each rank receives only what is addressed to it; a part is turned into bytes once.
    """
    packed = [to_bytes(part) for part in parts]
    payloads = [packed[part] for part in part_of]
    sizes = torch.tensor([len(p) for p in payloads], device=platform.device())
    incoming_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(incoming_sizes, sizes)
    incoming_sizes = incoming_sizes.tolist()
    received = torch.empty(sum(incoming_sizes), dtype=torch.uint8, device=platform.device())
    dist.all_to_all_single(
        received, torch.cat(payloads).to(platform.device()), incoming_sizes, [len(p) for p in payloads]
    )
    return [item for piece in received.cpu().split(incoming_sizes) for item in from_bytes(piece)]


def to_bytes(items: list[Any]) -> Tensor:
    """A payload of items, uint8; an empty one of none."""
    return torch.frombuffer(bytearray(pickle.dumps(items)), dtype=torch.uint8) if items else torch.zeros(0).byte()


def from_bytes(payload: Tensor) -> list[Any]:
    """What `to_bytes` was given."""
    return pickle.loads(payload.numpy().tobytes()) if len(payload) else []
