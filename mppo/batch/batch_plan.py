"""Plans: which trajectories form a mini-batch, who trains them, and in which micro-batch.

All functions here are pure functions of the lengths of the *whole* batch, so that every rank computes the same
plan and none can disagree. What holds of them together, whatever the input:
  - every trajectory is in exactly one mini-batch of an epoch, on one rank, in one micro-batch;
  - mini-batches are of whole prompts, in order or in one drawn from a seed; their numbers of prompts differ by at most
    one and do not depend on the number of ranks;
  - in every mini-batch the heaviest and the lightest rank differ by at most the heaviest trajectory;
  - in a mini-batch all ranks have the same number of micro-batches, a positive multiple of the group size of an
    interleaved schedule; they are ordered by workload, heaviest first, empty ones last;
  - no micro-batch exceeds its limit;
  - the same input gives the same plan.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from mppo.batch.balance import balanced_parts, best_fit
from mppo.errors import ConfigError, DataError

PATIENCE = 64
"""Full micro-batches that a trajectory is refused by before an even spread is given up; keeps planning fast."""

T = TypeVar("T")
Lengths = Sequence[int] | Mapping[int, int]
"""Tokens of each trajectory, by its index in the batch."""
Cost = Callable[[int], float]
"""The workload of a sequence of so many tokens, which grows with them."""


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much of one micro-batch one GPU may hold, as the configuration says it: trajectories, or tokens."""

    trajectories: int | None = None
    """Whole ones, however many context-parallel GPUs share them."""
    tokens: int | None = None
    """Per GPU, padding included."""
    field: str = "the limit of tokens per GPU"
    """The configuration field that an error names."""

    def __post_init__(self):
        if (self.trajectories is None) == (self.tokens is None):
            raise ConfigError("a micro-batch is limited either by trajectories or by tokens, not by both or neither")
        if (self.trajectories or self.tokens or 0) <= 0:
            raise ConfigError(f"the limit of a micro-batch is {self.trajectories or self.tokens}; it must be positive")

    def of_replica(self, context_parallel_size: int = 1, token_multiple: int = 1) -> "ReplicaLimit":
        """The limit on a data-parallel replica, where each trajectory is cut over `context_parallel_size` GPUs and the
        tokens on each are padded to a multiple of `token_multiple`."""
        return ReplicaLimit(self, context_parallel_size, token_multiple)


@dataclass(frozen=True)
class ReplicaLimit:
    """How much one micro-batch of a data-parallel replica may hold: on all its context-parallel GPUs together."""

    per_gpu: MicroBatchLimit
    context_parallel_size: int = 1
    token_multiple: int = 1
    """The tokens on each GPU are padded to a multiple of this."""

    @property
    def tokens(self) -> int | None:
        """On all context-parallel GPUs together; None where trajectories are counted."""
        per_gpu = self.per_gpu.tokens
        return None if per_gpu is None else self.context_parallel_size * (per_gpu - per_gpu % self.token_multiple)

    @property
    def most(self) -> int:
        """In trajectories or tokens."""
        return self.per_gpu.trajectories or self.tokens or 0

    def size(self, length: int) -> int:
        """How much of it a trajectory of `length` tokens takes up."""
        return length if self.per_gpu.trajectories is None else 1

    def check(self, trajectory: str, length: int) -> None:
        """Raise DataError that names the trajectory, of `length` padded tokens, if no micro-batch has room."""
        if self.tokens is None or length <= self.tokens:
            return
        gpus, multiple = self.context_parallel_size, self.token_multiple
        of_gpus = f" of {gpus} context-parallel GPUs, padding included" if gpus > 1 else ""
        needed = -(-length // (gpus * multiple)) * multiple
        raise DataError(
            f"{trajectory} has {length} tokens, over the micro-batch budget of {self.tokens}{of_gpus};"
            f" raise {self.per_gpu.field} from {self.per_gpu.tokens} to {needed} or more"
        )


def split_mini_batches(count: int, mini_batch_size: int, shuffle_seed: str | None = None) -> list[list[int]]:
    """Cut `count` prompts into ceil(count / mini_batch_size) mini-batches whose sizes differ by at most one.

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


def assign_ranks(mini_batches: list[list[int]], workloads: Sequence[float], ranks: int) -> list[int]:
    """The rank of each trajectory, such that every mini-batch by itself is balanced over the ranks.

    Mini-batches share no trajectory: they are those of one epoch. The heaviest part of one goes to the rank that has
    least of the earlier ones, so that a union of several, such as the whole batch, is balanced as well; a subset of one
    is not.
    """
    rank_of = [0] * len(workloads)
    loads = [0.0] * ranks

    def load(part: list[int]) -> float:
        return sum(workloads[i] for i in part)

    for mini_batch in mini_batches:
        heaviest_first = sorted(balanced_parts(mini_batch, workloads, ranks), key=load, reverse=True)
        lightest_first = sorted(range(ranks), key=loads.__getitem__)
        for rank, part in zip(lightest_first, heaviest_first, strict=True):
            loads[rank] += load(part)
            for index in part:
                rank_of[index] = rank
    return rank_of


def by_rank(items: Iterable[T], rank_of: Iterable[int], ranks: int) -> list[list[T]]:
    """The items of each data-parallel rank, in order, in one pass."""
    parts: list[list[T]] = [[] for _ in range(ranks)]
    for item, rank in zip(items, rank_of, strict=True):
        parts[rank].append(item)
    return parts


def plan_micro_batches(
    parts: list[list[int]], lengths: Lengths, limit: ReplicaLimit, multiple: int = 1, cost: Cost = float
) -> list[list[list[int]]]:
    """Cut the part that each rank has of a mini-batch into micro-batches: `plan[rank][micro_batch]` -> indices.

    `parts[rank]` lists trajectories, whose tokens `lengths` has. As few micro-batches as
    the fullest rank needs, best fit, rounded up to a multiple of `multiple`, at least one; each rank then spreads its
    workload evenly over them, where the limit leaves room for that, and has the heaviest first.
    Raises DataError that names a trajectory longer than the token limit, on every rank alike.
    """
    for index in (i for part in parts for i in part):
        limit.check(f"trajectory {index}", lengths[index])
    longest_first = [sorted(part, key=lambda i: (-lengths[i], i)) for part in parts]
    fewest = [_pack(part, lengths, limit) for part in longest_first]
    needed = max((len(micro_batches) for micro_batches in fewest), default=1)
    count = max(multiple, -(-needed // multiple) * multiple)

    def load(micro_batch: list[int]) -> float:
        return sum(cost(lengths[i]) for i in micro_batch)

    plan = []
    for part, packed in zip(longest_first, fewest, strict=True):
        micro_batches = _spread(part, lengths, limit, count, cost) or packed + [[] for _ in range(count - len(packed))]
        plan.append([sorted(micro_batch) for micro_batch in sorted(micro_batches, key=load, reverse=True)])
    return plan


def _pack(longest_first: list[int], lengths: Lengths, limit: ReplicaLimit) -> list[list[int]]:
    """As few micro-batches as best fit takes."""
    bins = best_fit([(limit.size(lengths[i]), i) for i in longest_first], limit.most)
    return [[index for _, index in items] for items in bins]


def _spread(
    longest_first: list[int], lengths: Lengths, limit: ReplicaLimit, count: int, cost: Cost
) -> list[list[int]] | None:
    """Exactly `count` micro-batches; each trajectory goes to the one with the least workload among those with room.

    None if a trajectory has no room, or has none in the PATIENCE first that it is offered.
    """
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    rooms = [limit.most] * count
    heap = [(0.0, k) for k in range(count)]
    least = limit.size(lengths[longest_first[-1]]) if longest_first else 0
    for index in longest_first:
        size, full = limit.size(lengths[index]), []
        while heap and rooms[heap[0][1]] < size:
            full.append(heapq.heappop(heap))
        if not heap or len(full) > PATIENCE:
            return None
        load, k = heap[0]
        micro_batches[k].append(index)
        rooms[k] -= size
        heapq.heapreplace(heap, (load + cost(lengths[index]), k))
        for entry in full:
            if rooms[entry[1]] >= least:
                heapq.heappush(heap, entry)
    return micro_batches
