"""Plans: which trajectories form a mini-batch, who trains them, and in which micro-batch.

All functions here are pure functions of the lengths of the *whole* batch, so that every rank computes the same
plan and none can disagree. Invariants, whatever the input:
  - every trajectory is in exactly one mini-batch of an epoch, on one rank, in one micro-batch;
  - the composition of a mini-batch does not depend on the number of ranks;
  - all ranks have the same number of micro-batches, a multiple of `multiple`; a rank may have empty ones;
  - no micro-batch exceeds its limit.
"""

import heapq
import random
from dataclasses import dataclass
from itertools import pairwise

from mppo.errors import ConfigError, DataError


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much goes into one micro-batch of one data-parallel rank: a number of trajectories, or of tokens."""

    trajectories: int | None = None
    tokens: int | None = None

    def __post_init__(self):
        if (self.trajectories is None) == (self.tokens is None):
            raise ConfigError("a micro-batch is limited either by trajectories or by tokens, not by both or neither")
        if (self.trajectories or self.tokens or 0) <= 0:
            raise ConfigError(f"the limit of a micro-batch is {self.trajectories or self.tokens}; it must be positive")


def split_mini_batches(count: int, mini_batch_size: int, shuffle_seed: str | None = None) -> list[list[int]]:
    """Cut `count` trajectories into ceil(count / mini_batch_size) mini-batches whose sizes differ by at most one.

    In order of index, or in an order drawn from `shuffle_seed`.
    """
    if mini_batch_size <= 0:
        raise ConfigError(f"the mini-batch size is {mini_batch_size}; it must be positive")
    order = list(range(count))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    parts = -(-count // mini_batch_size)
    bounds = [i * count // parts for i in range(parts + 1)] if parts else [0]
    return [sorted(order[a:b]) for a, b in pairwise(bounds)]


def assign_ranks(mini_batches: list[list[int]], workloads: list[float], ranks: int) -> list[int]:
    """The rank of each trajectory, such that every mini-batch by itself is balanced over the ranks.

    Greedy: heaviest first to the least loaded rank (ties: to the one with fewer trajectories).
    """
    rank_of = [0] * len(workloads)
    for mini_batch in mini_batches:
        heap = [(0.0, 0, rank) for rank in range(ranks)]
        for index in sorted(mini_batch, key=lambda i: (-workloads[i], i)):
            load, held, rank = heapq.heappop(heap)
            rank_of[index] = rank
            heapq.heappush(heap, (load + workloads[index], held + 1, rank))
    return rank_of


def plan_micro_batches(
    parts: list[list[int]], lengths: list[int], limit: MicroBatchLimit, multiple: int = 1
) -> list[list[list[int]]]:
    """Cut the part that each rank has of a mini-batch into micro-batches: `plan[rank][micro_batch]` -> indices.

    `parts[rank]` lists trajectories; `lengths` are tokens of every trajectory of the batch; the common number of
    micro-batches is a multiple of `multiple` (the group size of interleaved schedules), at least one.
    Raises DataError that names a trajectory longer than the token limit, on every rank alike.
    """
    for index in (i for part in parts for i in part):
        check_budget(index, lengths[index], limit)
    count = max((_fewest(part, lengths, limit) for part in parts), default=1)
    while True:
        count = max(multiple, -(-count // multiple) * multiple)
        plans = [_fill(part, lengths, limit, count) for part in parts]
        if all(plan is not None for plan in plans):
            return plans
        count += 1


def check_budget(index: int, length: int, limit: MicroBatchLimit) -> None:
    """Raise DataError that names a trajectory no micro-batch has room for."""
    if limit.tokens is not None and length > limit.tokens:
        raise DataError(
            f"trajectory {index} has {length} tokens, over the micro-batch budget of {limit.tokens}; "
            "raise max_token_len_per_gpu to the longest prompt plus response"
        )


def _fewest(part: list[int], lengths: list[int], limit: MicroBatchLimit) -> int:
    """The least number of micro-batches worth trying."""
    if limit.trajectories is not None:
        return -(-len(part) // limit.trajectories)
    return -(-sum(lengths[i] for i in part) // limit.tokens)


def _fill(part: list[int], lengths: list[int], limit: MicroBatchLimit, count: int) -> list[list[int]] | None:
    """Spread a part over exactly `count` micro-batches, longest first to the emptiest; None if the budget breaks."""
    if limit.trajectories is not None:
        chunks = [part[i : i + limit.trajectories] for i in range(0, len(part), limit.trajectories)]
        return chunks + [[] for _ in range(count - len(chunks))]
    heap = [(0, k) for k in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(part, key=lambda i: (-lengths[i], i)):
        filled, k = heapq.heappop(heap)
        if filled + lengths[index] > limit.tokens:
            return None
        bins[k].append(index)
        heapq.heappush(heap, (filled + lengths[index], k))
    return [sorted(b) for b in bins]


def workload(length: int, hidden_size: int) -> float:
    """Relative cost of a sequence: linear layers `12 hidden^2` parameters a token, attention `length * hidden`."""
    return 12.0 * hidden_size * length + float(length) ** 2
