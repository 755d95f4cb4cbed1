"""Which data-parallel rank holds a trajectory, and how trajectories get there.

From the rank that generated a trajectory it goes once to each replica that trains it, along the data-parallel group,
and is shared inside the replica. Before an epoch of other mini-batches trajectories move between replicas, with every
field they have by then. Every rank knows who sends what, so nothing but the vectors travels, as typed tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from torch import Tensor

from mppo.batch.batch_plan import assign_ranks, by_rank
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.table import TrajectorySummary, TrajectoryTable
from mppo.batch.trajectory import Answer
from mppo.megatron.collectives import exchange_rows, gather_from_all, gather_rows
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.trainer.batches import StepBatch, mini_batches_of_epoch, tabulate
from mppo.trainer.run_spec import RunSpec, UpdateSettings

Swap = Callable[[Tensor, list[int], list[int]], Tensor]
"""`(x, sent, received)`: the first `sent[0]` rows of `x` go to rank 0, the next `sent[1]` to rank 1, and so on; returns
the rows that come here, `received[r]` of them from rank r, in order of rank."""


@dataclass(frozen=True)
class Links:
    """How vectors travel from this rank."""

    swap: Swap
    """Along the data-parallel group."""
    share: Callable[[Tensor, list[int]], Tensor]
    """`(x, sizes)`: the rows of all ranks of the replica, one after another; rank r has `sizes[r]`."""

    @classmethod
    def of(cls, topology: Topology) -> "Links":
        swap, share = (
            partial(exchange_rows, group=topology.dp_group),
            partial(gather_rows, group=topology.replica_group),
        )
        return cls(swap, share)


Holders = Mapping[int, int]
"""The data-parallel rank of each trajectory, by its index in the batch of the step."""


def distribute(answers: list[Answer], spec: RunSpec, model: ModelConfig, step: int, topology: Topology) -> StepBatch:
    """The batch of a step, from what this rank generated for it.

    Each mini-batch of the actor's first epoch is balanced over data-parallel ranks by workload, and so is the whole
    batch. The plan follows from the summaries of all trajectories, which every rank learns here. Collective over the
    world; raises DataError, on every rank, when nothing can train.
    """
    everywhere = gather_from_all([TrajectorySummary.of(answer) for answer in answers])
    summaries = [summary for summaries in everywhere for summary in summaries]
    table, workload, mini_batches = tabulate(summaries, spec.actor, model, topology.dp, spec.config.trainer.seed, step)
    index_of = {summary.uid: index for index, summary in enumerate(table.summaries)}
    producer = {s.uid: rank for rank, summaries in enumerate(everywhere) for s in summaries}
    mine = sorted((a for a in answers if a.trajectory.uid in index_of), key=lambda a: a.trajectory.uid)
    packed = pack(
        [answer.trajectory for answer in mine],
        [answer.judgement for answer in mine],
        [index_of[answer.trajectory.uid] for answer in mine],
    )
    producer_of = [producer[summary.uid] for summary in table.summaries]
    packed = deliver(packed, producer_of, table, topology, Links.of(topology))
    return StepBatch(packed, table, step, workload, mini_batches)


def deliver(
    batch: PackedBatch, producer_of: Sequence[int], table: TrajectoryTable, topology: Topology, links: Links
) -> PackedBatch:
    """The trajectories that this rank's replica trains, in order of index, from what every rank generated.

    `batch` holds those that this rank generated, `producer_of[i]` is the rank of the world that generated trajectory i.
    Collective over the world.
    """
    peers = _by_replica_rank(producer_of, topology)
    mine, me = peers[topology.replica_rank], topology.dp_rank
    before = {index: topology.dp_rank_of(producer_of[index]) for index in mine}
    after = {index: table.rank_of[index] for index in mine}
    arrived = moved(batch, before, after, table.lengths, (me, topology.dp), links.swap)
    if topology.replica_size == 1:
        return arrived
    held = [[index for index in indices if table.rank_of[index] == me] for indices in peers]
    sizes = [sum(table.lengths[index] for index in indices) for indices in held]
    together = list(chain.from_iterable(held))
    lengths = [table.lengths[index] for index in together]
    return _in_order(arrived.exchanged(lengths, together, lambda x: links.share(x, sizes)))


def _by_replica_rank(producer_of: Sequence[int], topology: Topology) -> list[list[int]]:
    """The trajectories that came from each position within a replica, whichever replica it was."""
    return by_rank(range(len(producer_of)), map(topology.replica_rank_of, producer_of), topology.replica_size)


def _in_order(batch: PackedBatch) -> PackedBatch:
    """Its trajectories in order of index; it is nobody's selection."""
    indices = batch.indices.tolist()
    return replace(batch.select(sorted(range(len(indices)), key=indices.__getitem__)), origin=None)


def balanced_mini_batches(
    batch: StepBatch, settings: UpdateSettings, seed: int, topology: Topology
) -> Iterator[tuple[StepBatch, list[int]]]:
    """Yield for each optimizer step its trajectories (by index), and the batch that is balanced for them.

    In every mini-batch of every epoch the workloads of two data-parallel ranks differ by at most that of its heaviest
    trajectory. Collective over data-parallel ranks before an epoch for which trajectories have to move.
    """
    workloads = [batch.workload(length) for length in batch.table.lengths]
    for epoch in range(settings.epochs):
        mini_batches = mini_batches_of_epoch(batch.table.prompts, settings, seed, batch.step, epoch)
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
    rank_and_size = (topology.dp_rank, topology.dp)
    packed = moved(batch.packed, before, after, batch.table.lengths, rank_and_size, Links.of(topology).swap)
    return replace(batch, packed=packed, table=replace(batch.table, rank_of=rank_of))


def moved(
    batch: PackedBatch,
    before: Holders,
    after: Holders,
    lengths: Sequence[int],
    rank_and_size: tuple[int, int],
    swap: Swap,
) -> PackedBatch:
    """What a data-parallel rank holds once every trajectory is on the rank that `after` names, in order of index.

    `batch` is what it holds by `before`; both name the same trajectories, `lengths[i]` are the tokens of each. Every
    rank calls `swap` as often: for each vector that there is.
    """
    rank, ranks = rank_and_size

    def held(holders: Holders) -> list[int]:
        return sorted(index for index, owner in holders.items() if owner == rank)

    mine, wanted = held(before), held(after)
    outgoing = by_rank(mine, [after[i] for i in mine], ranks)
    incoming = by_rank(wanted, [before[i] for i in wanted], ranks)
    sent, received = ([sum(lengths[i] for i in indices) for indices in side] for side in (outgoing, incoming))

    row_of = {index: row for row, index in enumerate(batch.indices.tolist())}
    leaving = batch.select([row_of[i] for i in chain.from_iterable(outgoing)])
    arriving = list(chain.from_iterable(incoming))
    return _in_order(leaving.exchanged([lengths[i] for i in arriving], arriving, lambda x: swap(x, sent, received)))
