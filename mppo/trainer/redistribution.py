"""Mini-batches that are each balanced by themselves: trajectories change data-parallel ranks between epochs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mppo.batch.batch_plan import assign_ranks
from mppo.batch.moving import moved
from mppo.megatron.collectives import exchange_rows
from mppo.megatron.topology import Topology
from mppo.trainer.batches import StepBatch, mini_batches_of_epoch
from mppo.trainer.run_spec import UpdateSettings


def balanced_mini_batches(
    batch: StepBatch, settings: UpdateSettings, seed: int, topology: Topology
) -> Iterator[tuple[StepBatch, list[int]]]:
    """Yield for each optimizer step its trajectories (of the global batch), and the batch that is balanced for them.

    In every mini-batch of every epoch the workloads of two data-parallel ranks differ by at most that of its heaviest
    trajectory. Collective over data-parallel ranks before an epoch for which trajectories have to move.
    """
    workloads = [batch.cost(length) for length in batch.table.lengths]
    for epoch in range(settings.epochs):
        mini_batches = mini_batches_of_epoch(len(workloads), settings, seed, batch.step, epoch)
        if mini_batches != batch.balanced:
            batch = redistribute(batch, assign_ranks(mini_batches, workloads, topology.dp), topology)
            batch = replace(batch, balanced=mini_batches)
        for indices in mini_batches:
            yield batch, indices


def redistribute(batch: StepBatch, rank_of: list[int], topology: Topology) -> StepBatch:
    """Bring every trajectory, with all fields it has by now, to the data-parallel rank that `rank_of` names.

    A rank exchanges with those in its place of the other replicas: ranks of one replica hold the same, but for hidden
    states, which its last stage has. Collective over data-parallel ranks, unless nothing moves.
    """
    before = batch.table.rank_of
    if rank_of == before:
        return batch
    swap = partial(exchange_rows, group=topology.dp_group)
    packed = moved(batch.packed, before, rank_of, batch.table.lengths, topology.dp_rank, topology.dp, swap)
    return replace(batch, packed=packed, table=replace(batch.table, rank_of=rank_of))
