"""How even, how full and how fast batch plans are: `python -m tests.bench.plan`.

Every mini-batch is divided over data-parallel ranks by workload, and the heaviest rank is compared with the mean; 1 is
perfect. No division of whole sequences can be better than the bound, which is above 1 where a sequence alone, or the
lightest sequences that must share a rank, have more than the mean. Workloads are those of Qwen2.5-7B.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import MicroBatchLimit
from tests.unit.whole_plan import BatchPlan, make_batch_plan

SEED = 0
MINI_BATCHES = 8
"""Of each case; the worst one counts."""
GOAL = 1.02
SIZES = [(256, 8), (256, 32), (256, 64), (512, 64), (1024, 64), (8192, 512)]
"""Sequences of a mini-batch, and ranks."""
QWEN_7B = SimpleNamespace(
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_query_groups=4,
    head_dim=128,
    active_ffn_size=18944,
    vocab_size=152064,
)
COST = WorkloadModel.of(QWEN_7B, projected=0.8)


@dataclass(frozen=True)
class Mix:
    """A distribution of lengths, in tokens."""

    name: str
    draw: Callable[[random.Random], float]
    cap: int
    realistic: bool = True

    def lengths(self, count: int) -> list[int]:
        rng = random.Random(f"{SEED}/{self.name}")
        return [min(max(int(self.draw(rng)), 1), self.cap) for _ in range(count)]


def log_normal(middle: float, sigma: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.lognormvariate(math.log(middle), sigma)


def bimodal(rng: random.Random) -> float:
    """Three short answers to each long chain of thought."""
    middle, sigma = (700, 0.4) if rng.random() < 0.75 else (6000, 0.3)
    return rng.lognormvariate(math.log(middle), sigma)


LARGE = Mix("log-normal, cap 8k", log_normal(1500, 0.9), 8192)
MIXES = [
    LARGE,
    Mix("log-normal, cap 32k", log_normal(4000, 1.0), 32768),
    Mix("bimodal, cap 16k", bimodal, 16384),
    Mix("uniform, cap 8k", lambda rng: rng.uniform(1, 8192), 8192, realistic=False),
]


@dataclass(frozen=True)
class Case:
    """The worst of several mini-batches. Ratios are of the heaviest rank to the mean."""

    mix: str
    realistic: bool
    mini_batch: int
    ranks: int
    bound: float
    mppo: float
    mppo_where_possible: float | None
    """The worst of the mini-batches whose own bound is within the goal."""
    karmarkar_karp: float
    first_fit: float
    in_order: float
    micro_batches: float
    """Of one rank, mean over mini-batches."""
    fewest_micro_batches: float
    """ceil(tokens / (ranks * budget)), mean over mini-batches: no plan has fewer."""
    in_step: float
    """Time if ranks waited for each other after each micro-batch, over the mean load. They need not."""


# other ways to divide: loads of the ranks


def karmarkar_karp(workloads: list[float], ranks: int) -> list[float]:
    """Largest differencing, any number of sequences to a rank (the reference's with `equal_size=False`).

    Partial divisions, largest spread first, are merged two at a time: heaviest rank of one with lightest of the other.
    """
    heap = [(-w, number, [w]) for number, w in enumerate(workloads)]  # loads in descending order, zeros left out
    heapq.heapify(heap)
    for number in range(len(workloads), 2 * len(workloads) - 1):
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        alone, paired = a[: ranks - len(b)], a[ranks - len(b) :]
        met = [x + y for x, y in zip(paired, reversed(b[len(b) - len(paired) :]), strict=True)]
        merged = sorted(alone + b[: len(b) - len(paired)] + met, reverse=True)
        lightest = merged[-1] if len(merged) == ranks else 0.0
        heapq.heappush(heap, (lightest - merged[0], number, merged))
    return heap[0][2] + [0.0] * (ranks - len(heap[0][2]))


def first_fit(workloads: list[float], ranks: int) -> list[float]:
    """Heaviest first to the first rank that stays within the bound, or else to the lightest rank."""
    capacity, loads = least_possible(workloads, ranks), [0.0] * ranks
    for w in sorted(workloads, reverse=True):
        fitting = (rank for rank, load in enumerate(loads) if load + w <= capacity)
        loads[next(fitting, loads.index(min(loads)))] += w
    return loads


def in_order(workloads: list[float], ranks: int) -> list[float]:
    """As they come, the same number to each rank."""
    bounds = [rank * len(workloads) // ranks for rank in range(ranks + 1)]
    return [sum(workloads[bounds[rank] : bounds[rank + 1]]) for rank in range(ranks)]


def least_possible(workloads: list[float], ranks: int) -> float:
    """A load that the heaviest rank of any division reaches.

    The mean; the heaviest sequence; and since k + 1 of the k * ranks + 1 heaviest share a rank, the lightest of those.
    """
    heaviest = sorted(workloads, reverse=True)
    shared = (sum(heaviest[k * ranks - k : k * ranks + 1]) for k in range(-(-len(heaviest) // ranks)))
    return max(sum(workloads) / ranks, *shared)


# measurements


def loads_of(plan: BatchPlan, indices: list[int], lengths: list[int], ranks: int) -> list[float]:
    """Of the ranks, by the trajectories `indices`."""
    loads = [0.0] * ranks
    for index in indices:
        loads[plan.rank_of[index]] += COST(lengths[index])
    return loads


def worst_over_mean(loads: list[float]) -> float:
    return max(loads) * len(loads) / sum(loads)


def in_step(micro_batches: list[list[list[int]]], lengths: list[int]) -> float:
    """The heaviest micro-batch at each position, added up, over the mean load of a rank."""
    costs = [[sum(COST(lengths[i]) for i in piece) for piece in of_rank] for of_rank in micro_batches]
    return sum(map(max, zip(*costs, strict=True))) * len(costs) / sum(map(sum, costs))


def measure(mix: Mix, mini_batch: int, ranks: int) -> Case:
    lengths, budget = mix.lengths(MINI_BATCHES * mini_batch), 2 * mix.cap
    limit = MicroBatchLimit(tokens=budget).of_replica()
    plan = make_batch_plan(lengths, mini_batch_size=mini_batch, ranks=ranks, limit=limit, cost=COST)
    workloads = [[COST(lengths[i]) for i in indices] for indices in plan.mini_batches]
    tokens = [sum(lengths[i] for i in indices) for indices in plan.mini_batches]
    bounds = [least_possible(w, ranks) * ranks / sum(w) for w in workloads]
    ratios = [worst_over_mean(loads_of(plan, indices, lengths, ranks)) for indices in plan.mini_batches]

    def worst(divide: Callable[[list[float], int], list[float]]) -> float:
        return max(worst_over_mean(divide(w, ranks)) for w in workloads)

    return Case(
        mix=mix.name,
        realistic=mix.realistic,
        mini_batch=mini_batch,
        ranks=ranks,
        bound=max(bounds),
        mppo=max(ratios),
        mppo_where_possible=max(
            (ratio for ratio, bound in zip(ratios, bounds, strict=True) if bound <= GOAL), default=None
        ),
        karmarkar_karp=worst(karmarkar_karp),
        first_fit=worst(first_fit),
        in_order=worst(in_order),
        micro_batches=fmean(len(of_ranks[0]) for of_ranks in plan.micro_batches),
        fewest_micro_batches=fmean(-(-total // (ranks * budget)) for total in tokens),
        in_step=max(in_step(of_ranks, lengths) for of_ranks in plan.micro_batches),
    )


def time_plan(sequences: int, ranks: int, mini_batch: int, repeats: int = 3) -> float:
    """Seconds, median."""
    lengths, limit = LARGE.lengths(sequences), MicroBatchLimit(tokens=2 * LARGE.cap).of_replica()

    def once() -> float:
        start = perf_counter()
        make_batch_plan(lengths, mini_batch_size=mini_batch, ranks=ranks, limit=limit, multiple=4, cost=COST)
        return perf_counter() - start

    return median(once() for _ in range(repeats))


def headline(cases: list[Case]) -> float:
    """The worst mini-batch of the realistic mixes, of those where the goal is possible at all."""
    return max(case.mppo_where_possible for case in cases if case.realistic and case.mppo_where_possible)


# output


def table(cases: list[Case]) -> Table:
    title = "Heaviest rank over mean, and micro-batches of a rank over the least number possible"
    result = Table("lengths", title=title, title_justify="left")
    for column in ("size", "ranks", "bound", "mppo", "K.-Karp", "first fit", "in order", "micro-batches", "in step"):
        result.add_column(column, justify="right")
    for case in cases:
        bound = f"{case.bound:.4f}" + (" *" if case.bound > GOAL else "  ")
        ratios = [f"{r:.4f}" for r in (case.mppo, case.karmarkar_karp, case.first_fit, case.in_order)]
        counts = f"{case.micro_batches:.1f} / {case.fewest_micro_batches:.1f}"
        size = f"{case.mini_batch:,}"
        result.add_row(case.mix, size, str(case.ranks), bound, *ratios, counts, f"{case.in_step:.3f}")
    result.caption = f"* no plan can reach {GOAL}: too little other work to set against the longest sequences"
    return result


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.plan", description="Measure batch plans.")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as well")
    parser.add_argument("--sequences", type=int, default=100_000, help="of the batch that is timed")
    parser.add_argument("--ranks", type=int, default=512, help="that it is planned for")
    parser.add_argument("--mini-batch", type=int, default=8192, help="sequences of each of its mini-batches")
    parser.add_argument("--quick", action="store_true", help="without the largest size, and time a smaller batch")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(sequences=10_000, ranks=64, mini_batch=1024)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    cases = []
    for mix in MIXES:
        for size in SIZES[:-1] if args.quick else SIZES:
            cases.append(measure(mix, *size))
            print(f"{mix.name}, {size[0]:,} on {size[1]} ranks: {cases[-1].mppo:.4f}", file=sys.stderr, flush=True)
    seconds = time_plan(args.sequences, args.ranks, args.mini_batch)

    console = Console(width=120)
    console.print(table(cases))
    worst = headline(cases)
    console.print(f"worst of the realistic mixes, where {GOAL} is possible: {worst:.4f}", highlight=False)
    console.print(f"{args.sequences:,} sequences on {args.ranks} ranks: {seconds:.2f} s", highlight=False)
    if args.json is not None:
        numbers = {
            "worst_rank_over_mean": worst,
            f"plan_seconds_{args.sequences}_on_{args.ranks}": seconds,
            "cases": [asdict(case) for case in cases],
        }
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
