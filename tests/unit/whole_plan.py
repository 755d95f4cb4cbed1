"""The plan of one epoch put together from its steps, as a training step puts it together."""

from dataclasses import dataclass

from mppo.batch.batch_plan import (
    Cost,
    ReplicaLimit,
    assign_ranks,
    by_rank,
    plan_micro_batches,
    split_mini_batches,
)


@dataclass(frozen=True)
class BatchPlan:
    """Who trains what, and when. Trajectories are named by their index in the batch."""

    mini_batches: list[list[int]]
    rank_of: list[int]
    """The data-parallel rank of each trajectory."""
    micro_batches: list[list[list[list[int]]]]
    """`[mini_batch][rank][k]` -> trajectories; some are empty."""


def make_batch_plan(
    lengths: list[int],
    *,
    mini_batch_size: int,
    ranks: int,
    limit: ReplicaLimit,
    multiple: int = 1,
    cost: Cost = float,
    shuffle_seed: str | None = None,
) -> BatchPlan:
    """The plan of one epoch over a batch of trajectories of `lengths` tokens, on `ranks` data-parallel ranks.

    Invariants, whatever the input:
      - every trajectory is in exactly one mini-batch, on one rank, in one micro-batch;
      - mini-batches, cut in order or in one drawn from `shuffle_seed`, differ in size by at most one, and do not depend
        on the number of ranks;
      - in every mini-batch the heaviest and the lightest rank differ by at most the heaviest trajectory;
      - in a mini-batch all ranks have the same number of micro-batches, a positive multiple of `multiple` (the group
        size of interleaved schedules); they are ordered by workload, heaviest first, empty ones last;
      - no micro-batch exceeds its limit;
      - the same input gives the same plan.
    Groups of trajectories may be cut anywhere. Raises DataError that names a trajectory longer than the token limit.
    """
    for index, length in enumerate(lengths):
        limit.check(f"trajectory {index}", length)
    mini_batches = split_mini_batches(len(lengths), mini_batch_size, shuffle_seed)
    rank_of = assign_ranks(mini_batches, [cost(n) for n in lengths], ranks)
    shares = [by_rank(indices, [rank_of[i] for i in indices], ranks) for indices in mini_batches]
    micro_batches = [plan_micro_batches(parts, lengths, limit, multiple, cost) for parts in shares]
    return BatchPlan(mini_batches, rank_of, micro_batches)
