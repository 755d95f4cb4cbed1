"""The batch of a training step: what every rank knows of all trajectories, and the part that this rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.plan import MicroBatchLimit, assign_ranks, plan_micro_batches, split_mini_batches, workload
from mppo.batch.trajectory import Trajectory
from mppo.megatron.collectives import exchange, gather_from_all
from mppo.megatron.topology import Topology
from mppo.trainer.resolve import UpdateSettings


@dataclass(frozen=True)
class TrajectoryTable:
    """A line for each trajectory of the global batch, the same on every rank; small however long they are."""

    lengths: list[int]
    """Tokens."""
    actions: list[int]
    """Positions that train."""
    groups: list[int]
    rewards: list[float]
    accuracies: list[float]
    parts: list[dict[str, float]]
    """Named parts of the reward."""
    rank_of: list[int]
    """The data-parallel rank that trains it."""

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, indices: list[int]) -> BatchCounts:
        """Of a mini-batch."""
        actions = [self.actions[i] for i in indices]
        return BatchCounts(tokens=sum(actions), trajectories=sum(n > 0 for n in actions))


@dataclass(frozen=True)
class StepBatch:
    """The batch of one training step on one rank."""

    packed: PackedBatch
    """The trajectories of this data-parallel rank, on the host."""
    table: TrajectoryTable
    step: int

    def with_fields(self, **fields) -> "StepBatch":
        return replace(self, packed=self.packed.with_fields(**fields))


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees on this rank."""

    micro_batches: list[PackedBatch]
    actions: int
    """Of all ranks: what Megatron's count of tokens adds up to."""


def balance(
    trajectories: list[Trajectory],
    accuracies: list[float],
    settings: UpdateSettings,
    hidden_size: int,
    step: int,
    topology: Topology,
) -> StepBatch:
    """Send every trajectory from the rank that generated it to all ranks of the replica that will train it.

    Each mini-batch of the actor, cut in order, is balanced over data-parallel ranks by workload; shuffled ones, and a
    critic's of another size, are as balanced as chance has it. The plan follows from the lengths of the
    whole batch, which every rank learns here; no rank receives a trajectory it does not hold afterwards.
    """
    lines = [
        (t.index, len(t), t.actions, t.group, t.total_reward, accuracy, t.parts)
        for t, accuracy in zip(trajectories, accuracies, strict=True)
    ]
    everyone = gather_from_all((topology.dp_rank, lines))
    replica_of = [dp_rank for dp_rank, _ in everyone]
    rows = sorted((row for _, rows in everyone for row in rows), key=lambda row: row[0])
    indices, lengths, actions, groups, rewards, accuracies, parts = (list(c) for c in zip(*rows, strict=True))
    _renumber(trajectories, indices, groups)
    mini_batches = split_mini_batches(len(lengths), settings.mini_batch_size)
    rank_of = assign_ranks(mini_batches, [workload(n, hidden_size) for n in lengths], topology.dp)
    outgoing = _by_rank(trajectories, [rank_of[t.index] for t in trajectories], topology.dp)
    received = exchange([outgoing[replica] for replica in replica_of])
    mine = sorted((t for items in received for t in items), key=lambda t: t.index)
    table = TrajectoryTable(lengths, actions, _dense(groups), rewards, accuracies, parts, rank_of)
    return StepBatch(pack(mine), table, step)


def _renumber(trajectories: list[Trajectory], indices: list[int], groups: list[int]) -> None:
    """Close gaps that trajectories which never came leave in the numbers of trajectories and groups, in place."""
    place_of = {index: place for place, index in enumerate(indices)}
    group_of = dict(zip(indices, _dense(groups), strict=True))
    for trajectory in trajectories:
        trajectory.group = group_of[trajectory.index]
        trajectory.index = place_of[trajectory.index]


def _by_rank(items: list, rank_of: list[int], ranks: int) -> list[list]:
    """The items of each data-parallel rank, in order, in one pass."""
    parts: list[list] = [[] for _ in range(ranks)]
    for item, rank in zip(items, rank_of, strict=True):
        parts[rank].append(item)
    return parts


def _dense(groups: list[int]) -> list[int]:
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    return [numbers[group] for group in groups]


def micro_batches(
    batch: StepBatch, indices: list[int], limit: MicroBatchLimit, topology: Topology
) -> list[PackedBatch]:
    """This rank's micro-batches of the trajectories `indices` (of the global batch); some may be all padding."""
    parts = _by_rank(indices, [batch.table.rank_of[i] for i in indices], topology.dp)
    if limit.tokens:  # padding to the multiple must fit in the budget as well
        limit = MicroBatchLimit(tokens=limit.tokens - limit.tokens % topology.token_multiple)
    plans = plan_micro_batches(parts, batch.table.lengths, limit, topology.micro_batch_multiple)
    place_of = {index: place for place, index in enumerate(batch.packed.indices.tolist())}
    return [
        batch.packed.select([place_of[i] for i in piece]).pad_to_multiple(topology.token_multiple)
        for piece in plans[topology.dp_rank]
    ]


def mini_batches(batch: StepBatch, settings: UpdateSettings, seed: int, topology: Topology) -> Iterator[MiniBatch]:
    """Yield the MiniBatch of each optimizer step: epochs times the batch, weights included.

    Which trajectories belong together does not depend on the layout; shuffling draws from (seed, step, epoch).
    """
    for epoch in range(settings.epochs):
        shuffle_seed = f"{seed}/{batch.step}/{epoch}" if settings.shuffle else None
        for indices in split_mini_batches(len(batch.table), settings.mini_batch_size, shuffle_seed):
            counts = batch.table.counts(indices)
            pieces = micro_batches(batch, indices, settings.limit, topology)
            yield MiniBatch([_weigh(piece, settings, counts) for piece in pieces], counts.tokens)


def _weigh(piece: PackedBatch, settings: UpdateSettings, counts: BatchCounts) -> PackedBatch:
    weights = token_weights(settings.loss_agg_mode, piece.training, piece.segments, counts, settings.norm)
    return piece.with_fields(weights=weights)
