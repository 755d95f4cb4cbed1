"""The batch of a training step on one rank, and how it is cut into mini-batches and micro-batches."""

from collections.abc import Collection, Sequence
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
from mppo.batch.packed import PackedBatch
from mppo.batch.table import LeftOut, TrajectorySummary, TrajectoryTable, in_order_of_names
from mppo.batch.trajectory import Purpose, Status
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.trainer.run_spec import UpdateSettings


@dataclass(frozen=True)
class StepBatch:
    """The batch of one training step on one rank."""

    packed: PackedBatch
    """The trajectories of this data-parallel rank, on the host."""
    table: TrajectoryTable
    step: int
    workload: WorkloadModel
    """What a pass of the actor over a trajectory costs, by its tokens; the critic's are planned by the same."""
    balanced: list[list[int]] | None = None
    """The mini-batches that `table.rank_of` was made for."""

    def with_fields(self, values: dict[str, Tensor | None] | None = None, /, **named: Tensor | None) -> "StepBatch":
        return replace(self, packed=self.packed.with_fields(values, **named))

    def only(self, fields: Collection[str]) -> "StepBatch":
        """Without what neither `fields` nor the masks name."""
        return replace(self, packed=self.packed.only({*fields, "kept"}))

    def keeping(self, kept: Tensor, reduction: Reduction) -> "StepBatch":
        """Only the actions `kept [T]` train. Collective over data-parallel ranks."""
        counts = torch.zeros(len(self.table), dtype=torch.long)
        counts[self.packed.indices] = self.packed.segments.lengths(kept)
        table = replace(self.table, kept=reduction.sum(counts).tolist())
        return replace(self.with_fields(kept=kept), table=table)

    @cached_property
    def row_of(self) -> dict[int, int]:
        """By the index of each trajectory that this rank holds, its number in `packed`."""
        return {index: row for row, index in enumerate(self.packed.indices.tolist())}

    def per_trajectory(self, numbers: Sequence[float]) -> Tensor:
        """`[S]` float64: those of this rank's trajectories, from one number for each trajectory of the step."""
        return torch.tensor([numbers[i] for i in self.packed.indices.tolist()], dtype=torch.double)


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees on this rank."""

    micro_batches: list[PackedBatch]
    total_tokens: int
    """Of its trajectories, prompts included, on all ranks: what Megatron's count of tokens adds up to."""


def tabulate(
    summaries: list[TrajectorySummary], settings: UpdateSettings, model: ModelConfig, ranks: int, seed: int, step: int
) -> tuple[TrajectoryTable, WorkloadModel, list[list[int]]]:
    """The table of a step, which of `ranks` data-parallel ranks trains what of it, what that costs, and for which
    mini-batches the ranks are balanced: those of the actor's first epoch, each by itself, and so the whole.

    A pure function of what every rank knows. Raises DataError when nothing can train.
    """
    greedy = [s for s in summaries if s.purpose == Purpose.BASELINE]
    incomparable = {s.uid.prompt for s in greedy if not s.is_judged}
    chosen = in_order_of_names([s for s in summaries if s.uid.prompt not in incomparable])
    lengths, actions = [s.length for s in chosen], [s.actions for s in chosen]
    workload = WorkloadModel.of(model, projected=sum(actions) / max(sum(lengths), 1))
    samples = [s for s in summaries if s.purpose == Purpose.SAMPLE]
    aborted = sum(s.status == Status.ABORTED for s in samples)
    abstained = sum(s.abstains and s.status != Status.ABORTED for s in samples)
    without_baseline = sum(s.trains for s in samples) - len(chosen)
    mini_batches = mini_batches_of_epoch([s.uid.prompt for s in chosen], settings, seed, step, epoch=0)
    table = TrajectoryTable(
        summaries=chosen,
        rank_of=assign_ranks(mini_batches, [workload(length) for length in lengths], ranks),
        kept=actions,
        baselines={s.uid.prompt: s.reward for s in greedy if s.is_judged} if greedy else None,
        left_out=LeftOut(aborted, abstained, without_baseline),
    )
    return table, workload, mini_batches


def mini_batches_of_epoch(
    prompts: Sequence[int], settings: UpdateSettings, seed: int, step: int, epoch: int
) -> list[list[int]]:
    """The trajectories of each optimizer step of an epoch, by index: whole prompts, numbers of which differ by at most
    one.

    `prompts[i]` is the number of the prompt of trajectory i. Which belong together does not depend on the layout;
    shuffling draws from (seed, step, epoch).
    """
    shuffle_seed = f"{seed}/{step}/{epoch}" if settings.shuffle else None
    of_prompt: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        of_prompt.setdefault(prompt, []).append(index)
    answers = list(of_prompt.values())
    parts = split_mini_batches(len(answers), settings.prompts, shuffle_seed)
    return [sorted(index for place in part for index in answers[place]) for part in parts]


def micro_batches(
    batch: StepBatch, indices: list[int], limit: MicroBatchLimit, topology: Topology, fields: Collection[str]
) -> list[PackedBatch]:
    """This replica's micro-batches of the trajectories `indices`, with these fields; some may be empty."""
    of_ranks = by_rank(indices, [batch.table.rank_of[i] for i in indices], topology.dp)
    lengths = {i: topology.padded_length(batch.table.lengths[i]) for i in indices}
    multiple = topology.micro_batch_multiple
    plans = plan_micro_batches(of_ranks, lengths, topology.replica_limit(limit), multiple, batch.workload)
    packed = batch.packed.only(fields)
    return [packed.select([batch.row_of[i] for i in piece]) for piece in plans[topology.dp_rank]]


def context_part(piece: PackedBatch, topology: Topology) -> PackedBatch:
    """This context-parallel rank's slice of a micro-batch, padded to what the layout asks for; an empty one is all
    padding."""
    return piece.context_slice(topology.cp_rank, topology.cp).pad_to_multiple(topology.token_multiple)


def check_budgets(table: TrajectoryTable, limits: list[MicroBatchLimit], topology: Topology) -> None:
    """Raise DataError, on every rank alike and before any pass, for a trajectory that no micro-batch has room for."""
    of_replica = [topology.replica_limit(limit) for limit in limits]
    for summary in table.summaries:
        padded = topology.padded_length(summary.length)
        for limit in of_replica:
            limit.check(str(summary.uid), padded)


def cut_mini_batch(
    batch: StepBatch, indices: list[int], settings: UpdateSettings, topology: Topology, fields: Collection[str]
) -> MiniBatch:
    """This rank's micro-batches of a mini-batch, with `fields` and the weight of every token loss."""
    counts = batch.table.counts(indices, settings.denominator)
    pieces = micro_batches(batch, indices, settings.limit, topology, {*fields, "kept"})
    total_tokens = sum(batch.table.lengths[i] for i in indices)
    weighted = [_with_token_weights(piece, settings, counts) for piece in pieces]
    return MiniBatch([context_part(piece, topology) for piece in weighted], total_tokens)


def _with_token_weights(piece: PackedBatch, settings: UpdateSettings, counts: BatchCounts) -> PackedBatch:
    weights = token_weights(settings.loss_agg_mode, piece.loss_mask, piece.segments, counts, settings.norm)
    return piece.with_fields(token_weights=weights)
