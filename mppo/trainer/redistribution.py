"""Which data-parallel rank holds a trajectory, and how trajectories get there.

From the rank that generated a trajectory it goes once to each replica that trains it, along the data-parallel group,
and is shared inside the replica. Before an epoch of other mini-batches trajectories move between replicas, with every
field they have by then. Every rank knows who sends what, so nothing but the vectors travels, as typed tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from torch import Tensor

from mppo.batch.batch_plan import assign_ranks, by_rank
from mppo.batch.packed import PackedBatch
from mppo.megatron.collectives import exchange_rows, gather_rows
from mppo.megatron.topology import Topology
from mppo.trainer.batches import StepBatch, mini_batches_of_epoch
from mppo.trainer.run_spec import UpdateSettings

Swap = Callable[[Tensor, list[int], list[int]], Tensor]
"""`(x, sent, received)`: the first `sent[0]` rows of `x` go to rank 0, the next `sent[1]` to rank 1, and so on; returns
the rows that come here, `received[r]` of them from rank r, in order of rank."""

Holders = Mapping[int, int]
"""The data-parallel rank of each trajectory, by its index in the batch of the step."""


def deliver(
    batch: PackedBatch, producer_of: Sequence[int], rank_of: Sequence[int], lengths: Sequence[int], topology: Topology
) -> PackedBatch:
    """The trajectories that this rank's replica trains, in order of index, from what every rank generated.

    `batch` holds those that this rank generated, `producer_of[i]` is the rank of the world that generated trajectory i,
    `rank_of[i]` the data-parallel rank that trains it, `lengths[i]` its tokens. Collective over the world.
    """
    peers, holders = _by_replica_rank(producer_of, topology), dict(enumerate(rank_of))
    mine = peers[topology.replica_rank]
    before = {index: topology.dp_rank_of(producer_of[index]) for index in mine}
    swap = partial(exchange_rows, group=topology.dp_group)
    arrived = moved(
        batch, before, {i: holders[i] for i in mine}, lengths, topology.dp_rank, topology.dp, swap
    )
    held = [[i for i in indices if rank_of[i] == topology.dp_rank] for indices in peers]
    return _shared(arrived, held, lengths, topology)


def _by_replica_rank(producer_of: Sequence[int], topology: Topology) -> list[list[int]]:
    """The trajectories that came from each position within a replica, whichever replica it was."""
    return by_rank(range(len(producer_of)), map(topology.replica_rank_of, producer_of), topology.replica_size)


def _shared(batch: PackedBatch, held: list[list[int]], lengths: Sequence[int], topology: Topology) -> PackedBatch:
    """What all ranks of a replica hold together, in order of index; `held[r]` is what its rank r has."""
    if topology.replica_size == 1:
        return batch
    sizes = [sum(lengths[i] for i in indices) for indices in held]
    together = list(chain.from_iterable(held))
    gathered = batch.exchanged([lengths[i] for i in together], together, lambda x: gather_rows(x, sizes, topology.replica_group))
    in_order = sorted(range(len(together)), key=together.__getitem__)
    return replace(gathered.select(in_order), origin=None)


def balanced_mini_batches(
    batch: StepBatch, settings: UpdateSettings, seed: int, topology: Topology
) -> Iterator[tuple[StepBatch, list[int]]]:
    """Yield for each optimizer step its trajectories (by index), and the batch that is balanced for them.

    In every mini-batch of every epoch the workloads of two data-parallel ranks differ by at most that of its heaviest
    trajectory. Collective over data-parallel ranks before an epoch for which trajectories have to move.
    """
    workloads = [batch.workload(length) for length in batch.table.lengths]
    for epoch in range(settings.epochs):
        mini_batches = mini_batches_of_epoch(len(workloads), settings, seed, batch.step, epoch)
        if mini_batches != batch.balanced:
            batch = redistribute(batch, assign_ranks(mini_batches, workloads, topology.dp), topology)
            batch = replace(batch, balanced=mini_batches)
        for indices in mini_batches:
            yield batch, indices


def redistribute(batch: StepBatch, rank_of: list[int], topology: Topology) -> StepBatch:
    """Bring every trajectory, with all fields it has by now, to the data-parallel rank that `rank_of` names.

    A rank exchanges with those in its position of the other replicas: ranks of one replica hold the same, but for
    hidden states, which its last stage has. Collective over data-parallel ranks, unless nothing moves.
    """
    if rank_of == batch.table.rank_of:
        return batch
    before, after = dict(enumerate(batch.table.rank_of)), dict(enumerate(rank_of))
    swap = partial(exchange_rows, group=topology.dp_group)
    packed = moved(batch.packed, before, after, batch.table.lengths, topology.dp_rank, topology.dp, swap)
    return replace(batch, packed=packed, table=replace(batch.table, rank_of=rank_of))


def moved(
    batch: PackedBatch, before: Holders, after: Holders, lengths: Sequence[int], rank: int, ranks: int, swap: Swap
) -> PackedBatch:
    """What rank `rank` of `ranks` holds once every trajectory is on the rank that `after` names, in order of index.

    `batch` is what it holds by `before`; both name the same trajectories, `lengths[i]` are the tokens of each. Every
    rank calls `swap` as often: for each vector that there is.
    """

    def held(holders: Holders) -> list[int]:
        return sorted(index for index, owner in holders.items() if owner == rank)

    mine, wanted = held(before), held(after)
    outgoing = by_rank(mine, [after[i] for i in mine], ranks)
    incoming = by_rank(wanted, [before[i] for i in wanted], ranks)
    sent, received = ([sum(lengths[i] for i in part) for part in sides] for sides in (outgoing, incoming))

    row_of = {index: row for row, index in enumerate(batch.indices.tolist())}
    leaving = batch.select([row_of[i] for i in chain.from_iterable(outgoing)])
    arriving = list(chain.from_iterable(incoming))
    arrived = leaving.exchanged([lengths[i] for i in arriving], arriving, lambda x: swap(x, sent, received))
    in_order = sorted(range(len(arriving)), key=arriving.__getitem__)
    return replace(arrived.select(in_order), origin=None)
