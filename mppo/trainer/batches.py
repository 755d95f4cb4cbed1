"""The batch of a training step: what every rank knows of all trajectories, and the part that this rank holds."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.reduction import Reduction
from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import (
    MicroBatchLimit,
    assign_ranks,
    by_rank,
    plan_micro_batches,
    split_mini_batches,
)
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.trajectory import Trajectory
from mppo.megatron.collectives import exchange, gather_from_all
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.trainer.run_spec import UpdateSettings


@dataclass(frozen=True)
class TrajectoryTable:
    """A line for each trajectory of the global batch, the same on every rank; small however long they are."""

    lengths: list[int]
    """Tokens."""
    responses: list[int]
    """Tokens from the first action on."""
    actions: list[int]
    """Positions that are actions."""
    groups: list[int]
    rewards: list[float]
    """Outcome and token rewards together, before shaping."""
    outcomes: list[float]
    accuracies: list[float]
    truncated: list[bool]
    """Cut at the maximum response length."""
    parts: list[dict[str, float]]
    """Named parts of the reward."""
    rank_of: list[int]
    """The data-parallel rank that holds it now, and trains it."""
    kept: list[int]
    """Positions that train: the actions that are neither rejected nor masked."""
    baselines: list[float] | None = None
    """Total reward of the greedy answer to the same prompt, where the estimator needs it."""

    def __len__(self) -> int:
        return len(self.lengths)

    def counts(self, indices: list[int], denominator: str) -> BatchCounts:
        """Of a mini-batch: all actions (`loss_mask`), or those that train (`kept`)."""
        of = self.kept if denominator == "kept" else self.actions
        counted = [of[i] for i in indices]
        return BatchCounts(tokens=sum(counted), trajectories=sum(n > 0 for n in counted))


@dataclass(frozen=True)
class StepBatch:
    """The batch of one training step on one rank."""

    packed: PackedBatch
    """The trajectories of this data-parallel rank, on the host."""
    table: TrajectoryTable
    step: int
    cost: WorkloadModel
    """What a pass of the actor over a trajectory costs, by its tokens; the critic's are planned by the same."""
    balanced: list[list[int]] | None = None
    """The mini-batches that `table.rank_of` was made for."""

    def with_fields(self, **fields) -> "StepBatch":
        return replace(self, packed=self.packed.with_fields(**fields))

    def keeping(self, kept: Tensor, reduction: Reduction) -> "StepBatch":
        """Only the actions `kept [T]` train. Collective over data-parallel ranks."""
        counts = torch.zeros(len(self.table), dtype=torch.long)
        counts[self.packed.indices] = self.packed.segments.lengths(kept)
        table = replace(self.table, kept=reduction.sum(counts).tolist())
        return replace(self.with_fields(kept=kept), table=table)

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Place on this rank of each trajectory of the global batch that it holds."""
        return {index: place for place, index in enumerate(self.packed.indices.tolist())}


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees on this rank."""

    micro_batches: list[PackedBatch]
    tokens: int
    """Of its trajectories, on all ranks: what Megatron's count of tokens adds up to."""


@dataclass(frozen=True)
class TrajectorySummary:
    """What every rank learns of a trajectory."""

    index: int
    length: int
    response: int
    actions: int
    group: int
    reward: float
    outcome: float
    accuracy: float
    truncated: bool
    parts: dict[str, float]

    @classmethod
    def of(cls, t: Trajectory) -> "TrajectorySummary":
        truncated = t.finish_reason == "length"
        rewards = (t.total_reward, t.reward, t.accuracy)
        return cls(t.index, len(t), t.response_length, t.actions, t.group, *rewards, truncated, t.parts)


def balance(
    trajectories: list[Trajectory],
    settings: UpdateSettings,
    model: ModelConfig,
    step: int,
    seed: int,
    topology: Topology,
    baselines: dict[int, float] | None = None,
) -> StepBatch:
    """Send every trajectory from the rank that generated it to all ranks of the replica that will train it.

    Each mini-batch of the actor's first epoch is balanced over data-parallel ranks by workload, and so is the whole
    batch; before an epoch of other mini-batches trajectories move (`mppo.trainer.redistribution`). The plan follows
    from the lengths of the whole batch, which every rank learns here; no rank receives a trajectory it does not hold
    afterwards. `baselines` are rewards of greedy answers by group.
    """
    everyone = gather_from_all((topology.dp_rank, [TrajectorySummary.of(t) for t in trajectories]))
    lines = [line for _, lines in everyone for line in lines]
    mini_batches = mini_batches_of_epoch(len(lines), settings, seed, step, epoch=0)
    table, cost = tabulate(lines, mini_batches, model, topology.dp, baselines)
    _renumber(trajectories, lines)
    outgoing = by_rank(trajectories, [table.rank_of[t.index] for t in trajectories], topology.dp)
    mine = exchange(outgoing, [dp_rank for dp_rank, _ in everyone])
    return StepBatch(pack(sorted(mine, key=lambda t: t.index)), table, step, cost, mini_batches)


def tabulate(
    lines: list[TrajectorySummary],
    mini_batches: list[list[int]],
    model: ModelConfig,
    ranks: int,
    baselines: dict[int, float] | None = None,
) -> tuple[TrajectoryTable, WorkloadModel]:
    """What every rank knows of a batch, which of `ranks` data-parallel ranks trains what, and what that costs."""
    lines = sorted(lines, key=lambda line: line.index)
    lengths, groups = [line.length for line in lines], [line.group for line in lines]
    actions = [line.actions for line in lines]
    cost = WorkloadModel.of(model, projected=sum(actions) / max(sum(lengths), 1))
    table = TrajectoryTable(
        lengths=lengths,
        responses=[line.response for line in lines],
        actions=actions,
        groups=_dense(groups),
        rewards=[line.reward for line in lines],
        outcomes=[line.outcome for line in lines],
        accuracies=[line.accuracy for line in lines],
        truncated=[line.truncated for line in lines],
        parts=[line.parts for line in lines],
        rank_of=assign_ranks(mini_batches, [cost(n) for n in lengths], ranks),
        kept=actions,
        baselines=None if baselines is None else [baselines[group] for group in groups],
    )
    return table, cost


def _renumber(trajectories: list[Trajectory], lines: list[TrajectorySummary]) -> None:
    """Close gaps that trajectories which never came leave in the numbers of trajectories and groups, in place."""
    place_of = {index: place for place, index in enumerate(sorted(line.index for line in lines))}
    group_of = dict(zip([line.index for line in lines], _dense([line.group for line in lines]), strict=True))
    for trajectory in trajectories:
        trajectory.group = group_of[trajectory.index]
        trajectory.index = place_of[trajectory.index]


def _dense(groups: list[int]) -> list[int]:
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    return [numbers[group] for group in groups]


def micro_batches(
    batch: StepBatch, indices: list[int], limit: MicroBatchLimit, topology: Topology
) -> list[PackedBatch]:
    """This replica's micro-batches of the trajectories `indices` (of the global batch); some may be empty."""
    parts = by_rank(indices, [batch.table.rank_of[i] for i in indices], topology.dp)
    lengths = {i: topology.padded_length(batch.table.lengths[i]) for i in indices}
    multiple = topology.micro_batch_multiple
    plans = plan_micro_batches(parts, lengths, topology.replica_limit(limit), multiple, batch.cost)
    return [batch.packed.select([batch.place_of[i] for i in piece]) for piece in plans[topology.dp_rank]]


def for_rank(piece: PackedBatch, topology: Topology) -> PackedBatch:
    """This rank's slice of a micro-batch, padded to what the layout asks for; an empty one is all padding."""
    return piece.context_slice(topology.cp_rank, topology.cp).pad_to_multiple(topology.token_multiple)


def check_budgets(table: TrajectoryTable, limits: list[MicroBatchLimit], topology: Topology) -> None:
    """Raise DataError, on every rank alike and before any pass, for a trajectory that no micro-batch has room for."""
    of_replica = [topology.replica_limit(limit) for limit in limits]
    for index, length in enumerate(table.lengths):
        padded = topology.padded_length(length)
        for limit in of_replica:
            limit.check(index, padded)


def mini_batches_of_epoch(count: int, settings: UpdateSettings, seed: int, step: int, epoch: int) -> list[list[int]]:
    """The trajectories of each optimizer step of an epoch over a global batch of `count`.

    Which belong together does not depend on the layout; shuffling draws from (seed, step, epoch).
    """
    shuffle_seed = f"{seed}/{step}/{epoch}" if settings.shuffle else None
    return split_mini_batches(count, settings.mini_batch_size, shuffle_seed)


def cut_mini_batch(batch: StepBatch, indices: list[int], settings: UpdateSettings, topology: Topology) -> MiniBatch:
    """This rank's micro-batches of a mini-batch, with the weight of every token loss."""
    counts = batch.table.counts(indices, settings.denominator)
    pieces = micro_batches(batch, indices, settings.limit, topology)
    tokens = sum(batch.table.lengths[i] for i in indices)
    return MiniBatch([for_rank(_weigh(piece, settings, counts), topology) for piece in pieces], tokens)


def _weigh(piece: PackedBatch, settings: UpdateSettings, counts: BatchCounts) -> PackedBatch:
    weights = token_weights(settings.loss_agg_mode, piece.training, piece.segments, counts, settings.norm)
    return piece.with_fields(weights=weights)
