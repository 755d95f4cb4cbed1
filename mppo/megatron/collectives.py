"""The few collectives of mppo's own, each called by every rank whatever it holds.

What is small is reduced and gathered on the host, over gloo, so that a rank that waits leaves its GPU alone; vectors of
the batch travel on the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

from mppo.algorithm.reduction import Reduction
from mppo.algorithm.statistics import Statistics, reduced
from mppo.errors import MppoError, RankError
from mppo.megatron import platform
from mppo.megatron.topology import Topology

WIDTH = 256
"""Columns of a field of vectors that are exchanged at a time."""


def _reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of copies of `x`, on the device where it is: numbers of the control plane are on the host."""
    result = x.clone()
    dist.all_reduce(result, group=group)
    return result


def _stacked(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks, *shape]`, on the device where `x` is."""
    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x, group)
    return torch.stack(pieces)


def data_parallel_reduction(topology: Topology) -> Reduction:
    """Of numbers about a data-parallel rank's part of the batch."""
    return _reduction(topology.dp_group)


def _reduction(group: dist.ProcessGroup) -> Reduction:
    return Reduction(
        sum=lambda x: _reduced(x, group),
        stack=lambda x: _stacked(x, group),
        gather=lambda x: _gathered(x, group),
    )


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n_r]` of each rank -> `[sum of n_r]`, in rank order."""
    sizes = [torch.zeros(1, dtype=torch.long, device=platform.device()) for _ in range(group.size())]
    dist.all_gather(sizes, torch.full_like(sizes[0], len(x)), group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=x.dtype, device=platform.device())
    padded[: len(x)] = x
    pieces = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(pieces, padded, group)
    return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)]).to(x.device)


def sum_with_gradient(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """A sum over the group through which gradients flow: `Segments.combine` where trajectories are cut over ranks.

    Each rank's loss depends on the sums, so the gradients of all ranks add up on the way back.
    """
    return partial(torch.distributed.nn.functional.all_reduce, group=group)


def join_slices(x: Tensor, topology: Topology) -> Tensor:
    """`[T, ...]` of which each context-parallel rank has its own positions, and 0 elsewhere -> all of it."""
    if topology.cp == 1:
        return x
    return _reduced(x.to(platform.device()), topology.cp_group).to(x.device)


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


def gather_rows(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows `x [N, ...]` of all ranks of the group, one after another in order of rank; rank r has `sizes[r]`.

    They travel as bytes, padded to the longest.
    """
    rows = x.unsqueeze(-1).view(torch.uint8).to(platform.device())
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group)
    together = torch.cat([piece[:size] for piece, size in zip(gathered, sizes, strict=True)])
    return together.view(x.dtype).squeeze(-1).to(x.device)


def from_last_stage(x: Tensor | None, like: Tensor, topology: Topology) -> Tensor:
    """Give every pipeline stage what the last one holds; `like` has its shape and dtype."""
    if topology.pp == 1:
        return x
    value = x if topology.is_last_stage else torch.empty_like(like)
    value = value.to(platform.device())
    dist.broadcast(value, topology.last_stage_rank, group=topology.pp_group)
    return value.to(like.device)


def reduce_statistics(statistics: Statistics, topology: Topology) -> Statistics:
    """Metrics of a mini-batch, exact over the global batch: reduced over DP x CP, one broadcast over PP.

    Every rank of that group must bring the same names.
    """
    whole: list[Statistics] = [{}]
    if topology.is_last_stage:
        whole = [reduced(statistics, _reduction(topology.dp_cp_group))]
    if topology.pp > 1:
        dist.broadcast_object_list(whole, topology.last_stage_rank, group=topology.pp_group)
    return whole[0]


def gather_from_all(item: Any) -> list[Any]:
    """One Python object of each rank of the world, on every rank, in rank order."""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def sum_over_ranks(numbers: dict[str, int]) -> dict[str, float]:
    """Of the same names on every rank of the world."""
    names = sorted(numbers)
    total = torch.tensor([numbers[name] for name in names], dtype=torch.double)
    dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise on every rank the first error that any of them raised inside, so that none waits for another.

    One that is no MppoError becomes a RankError with its traceback.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    failed = torch.tensor(int(mine is not None))
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed:
        return
    told = mine if mine is None or isinstance(mine, MppoError) else RankError.of(mine, dist.get_rank())
    first: MppoError = next(error for error in gather_from_all(told) if error is not None)
    first.on_every_rank = True
    raise first from mine
