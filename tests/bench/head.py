"""What the head costs, next to the usual ways: `python -m tests.bench.head`.

Forward and backward, to the hidden states and the output weight, of log-prob (and entropy) on two processes that share
the vocabulary (gloo, one thread each), against

(a) `log_softmax` over the whole vocabulary on each process, for a quarter of the tokens, its time taken fourfold and
    its memory as it was;
(b) megatron-core's vocabulary-parallel cross entropy over materialised logits, and for entropy a separate function
    over a copy of them, as trainers write it;
(c) the three matrix products of (b) alone: the limit of what keeps its logits. The head makes logits twice, so that
    its own limit is four products.

With half of the positions masked, the head is given the others only, as the hook does; the baselines compute all, and
mask afterwards. "idle": all positions are there, and half have no upstream gradient. Seconds are medians over
interleaved runs, each of the slower process; CPU seconds are those that the process itself was running, which say more
where other work shares the machine.

Extra peak is what the allocator handed out at the highest moment beyond what there was before, exact to the byte: on a
CPU from the profiler's memory events (of a run that is not timed), on a GPU from its statistics. The gradient of the
weight, which every contestant leaves behind, is taken off; that flatters a baseline whose peak comes before it. A
rank's logits are `[T, V/tp]` in the dtype of the hidden states.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mppo.megatron.head import LastHidden, PolicyHead
from tests.bench.relaunch import relaunch, under_torchrun

SEED = 0
LOGIT_SPREAD = 3.0
"""Standard deviation of logits."""
DENSE_SHARE = 4
# "both": log-prob and entropy; "half": half of the positions masked; "idle": half of them without upstream gradient
LOG_PROB, BOTH, HALF, IDLE = "mppo, log-prob", "mppo, both", "mppo, both, half", "mppo, both, idle"
DENSE, VOCABULARY_PARALLEL, PRODUCTS = "(a) both, dense", "(b) both", "(c) three products"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""By the scale of the largest gradient."""


@dataclass(frozen=True)
class Problem:
    """Inputs of one rank, in one dtype."""

    hidden: Tensor
    """`[T, H]`, as all others below that begin with T the same on every rank."""
    weight: Tensor
    """`[V/tp, H]`"""
    labels: Tensor
    slopes: Tensor
    """`[2, T]`: of the log-probs and of the entropies in the loss."""
    rows: Tensor
    """`[T/2]`: what the mask selects."""
    head: PolicyHead

    @classmethod
    def draw(cls, tokens: int, vocabulary: int, width: int, dtype: torch.dtype, device: torch.device) -> "Problem":
        group = parallel_state.get_tensor_model_parallel_group()
        common, own = (torch.Generator().manual_seed(SEED + k) for k in (0, 1 + group.rank()))
        hidden = torch.randn(tokens, width, generator=common)
        weight = torch.randn(vocabulary // group.size(), width, generator=own).mul_(LOGIT_SPREAD / width**0.5)
        return cls(
            hidden=hidden.to(device, dtype).requires_grad_(),
            weight=weight.to(device, dtype).requires_grad_(),
            labels=torch.randint(vocabulary, (tokens,), generator=common).to(device),
            slopes=torch.randn(2, tokens, generator=common).to(device),
            rows=torch.randperm(tokens, generator=common)[: tokens // 2].sort().values.to(device),
            head=PolicyHead(vocabulary, 1.0, group),
        )

    @property
    def logits_bytes(self) -> int:
        return len(self.hidden) * len(self.weight) * self.hidden.element_size()

    @property
    def weight_gradient_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


Gradients = tuple[Tensor, Tensor]
Contestant = Callable[[Problem], Gradients]
"""Runs forward and backward; returns the gradients of the hidden states and the weight."""


def gradients(x: Problem, terms: list[Tensor], slopes: Tensor) -> Gradients:
    loss = sum((term * slope).sum() for term, slope in zip(terms, slopes[: len(terms)], strict=True))
    return torch.autograd.grad(loss, (x.hidden, x.weight))


def mppo(x: Problem, names: tuple[str, ...], half: bool = False, idle: bool = False) -> Gradients:
    hidden, labels, slopes = x.hidden, x.labels, x.slopes
    if idle:
        slopes = slopes.index_fill(1, x.rows, 0.0)
    if half:
        hidden, labels, slopes = hidden.index_select(0, x.rows), labels[x.rows], slopes[:, x.rows]
    output = x.head(LastHidden(hidden, x.weight), labels)
    return gradients(x, [getattr(output, name) for name in names], slopes)


def vocabulary_parallel(x: Problem, with_entropy: bool) -> Gradients:
    """Logits leave Megatron's model in float32. The cross entropy works in place, hence the copy."""
    logits = (x.hidden @ x.weight.t()).float()
    terms = [-vocab_parallel_cross_entropy(logits.clone() if with_entropy else logits, x.labels)]
    if with_entropy:
        terms.append(_VocabularyParallelEntropy.apply(logits))
    del logits
    return gradients(x, terms, x.slopes)


class _VocabularyParallelEntropy(torch.autograd.Function):
    """`[T, V/tp] -> [T]`, with the softmax and the logits kept for the backward pass, which works in place."""

    @staticmethod
    def forward(ctx, logits):
        group = parallel_state.get_tensor_model_parallel_group()
        maximum = logits.amax(-1, keepdim=True)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        softmax = (logits - maximum).exp_()
        total = softmax.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax.div_(total)
        mean = (softmax * logits).sum(-1, keepdim=True)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (maximum + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        logits, softmax, mean = ctx.saved_tensors
        return softmax.mul_(logits.sub_(mean)).mul_(-grad[:, None])


def dense(x: Problem) -> Gradients:
    """As many words on this process as all ranks have together."""
    tokens, ranks = len(x.hidden) // DENSE_SHARE, x.head.tp_group.size()
    hidden = x.hidden.detach()[:tokens].requires_grad_()
    weight = x.weight.detach().repeat(ranks, 1).requires_grad_()
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    chosen = log_p.gather(1, x.labels[:tokens, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (chosen * x.slopes[0, :tokens] + entropy * x.slopes[1, :tokens]).sum()
    del log_p
    return torch.autograd.grad(loss, (hidden, weight))


def products(x: Problem) -> Gradients:
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits = hidden @ weight.t()
    return logits @ weight, logits.t() @ hidden


CONTESTANTS: dict[str, Contestant] = {
    LOG_PROB: partial(mppo, names=("log_probs",)),
    "mppo, log-prob, half": partial(mppo, names=("log_probs",), half=True),
    BOTH: partial(mppo, names=("log_probs", "entropy")),
    HALF: partial(mppo, names=("log_probs", "entropy"), half=True),
    IDLE: partial(mppo, names=("log_probs", "entropy"), idle=True),
    DENSE: dense,
    "(b) log-prob": partial(vocabulary_parallel, with_entropy=False),
    VOCABULARY_PARALLEL: partial(vocabulary_parallel, with_entropy=True),
    PRODUCTS: products,
}
BASELINE = {name: VOCABULARY_PARALLEL if "both" in name else "(b) log-prob" for name in CONTESTANTS}


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float
    extra_bytes: int


def extra_peak(x: Problem, run: Contestant) -> tuple[int, Gradients]:
    """Bytes at the highest moment, beyond what there was before and the gradient of the weight."""
    gc.collect()
    if x.hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = run(x)
        return torch.cuda.max_memory_allocated() - before - x.weight_gradient_bytes, found
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = run(x)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak - x.weight_gradient_bytes, found


def seconds(x: Problem, run: Contestant) -> tuple[float, float]:
    """By the clock, and of this process."""
    gc.collect()
    dist.barrier()
    start, cpu_start = perf_counter(), process_time()
    run(x)
    if x.hidden.is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - start, process_time() - cpu_start


def slowest(values: list[float]) -> list[float]:
    """Of the ranks, number by number."""
    everyone = torch.tensor(values, dtype=torch.double)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return everyone.tolist()


def say(text: str) -> None:
    """A line of progress, from the first process."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def peaks(x: Problem) -> list[int]:
    """Of each contestant. Raises AssertionError unless the head's gradients are those of (b)."""
    extra, found = {}, {}
    for name, run in CONTESTANTS.items():
        say(f"memory of {name}")
        extra[name], of_run = extra_peak(x, run)
        if name in (BOTH, HALF, VOCABULARY_PARALLEL):
            found[name] = of_run
    hidden, weight = found[VOCABULARY_PARALLEL]
    check_close(found[BOTH][0], hidden)
    check_close(found[BOTH][1], weight)
    check_close(found[HALF][0][x.rows], hidden[x.rows])
    return list(extra.values())


def check_close(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE[found.dtype], f"the head's gradients are {error:.1e} from those of (b)"


def measure(x: Problem, repeats: int) -> dict[str, Cost]:
    extra = slowest(peaks(x))
    times = [slowest(round_of_seconds(x, f"run {number} of {repeats}")) for number in range(1, repeats + 1)]
    middle = list(map(median, zip(*times, strict=True)))
    costs = map(Cost, middle[::2], middle[1::2], map(int, extra))
    found = dict(zip(CONTESTANTS, costs, strict=True))
    part = found[DENSE]
    return found | {DENSE: Cost(DENSE_SHARE * part.seconds, DENSE_SHARE * part.cpu_seconds, part.extra_bytes)}


def round_of_seconds(x: Problem, title: str) -> list[float]:
    """`seconds` of each contestant, end to end."""
    found = []
    for name, run in CONTESTANTS.items():
        found += seconds(x, run)
        say(f"{title}: {name} {found[-2]:.2f} s")
    return found


def table(dtype: str, costs: dict[str, Cost], logits_bytes: int) -> Table:
    result = Table(dtype)
    for column in ("s", "over (b)", "over (c)", "CPU s", "over (b)", "over (c)", "extra peak GB", "over logits"):
        result.add_column(column, justify="right")
    for name, cost in costs.items():
        base, limit = costs[BASELINE[name]], costs[PRODUCTS]
        pairs = [(cost.seconds, base.seconds, limit.seconds), (cost.cpu_seconds, base.cpu_seconds, limit.cpu_seconds)]
        times = [f"{x:.2f}" for own, b, c in pairs for x in (own, own / b, own / c)]
        result.add_row(name, *times, f"{cost.extra_bytes / 1e9:.3f}", f"{cost.extra_bytes / logits_bytes:.3f}")
    return result


def ratios(costs: dict[str, Cost], logits_bytes: int) -> dict[str, float]:
    """The headline ones: log-prob and entropy, against (b) of the same."""
    base = costs[VOCABULARY_PARALLEL]
    return {
        "extra_peak_over_logits": costs[BOTH].extra_bytes / logits_bytes,
        "time_over_vocab_parallel": costs[BOTH].seconds / base.seconds,
        "time_over_vocab_parallel_half_masked": costs[HALF].seconds / base.seconds,
        "cpu_time_over_vocab_parallel": costs[BOTH].cpu_seconds / base.cpu_seconds,
        "time_over_products": costs[BOTH].seconds / costs[PRODUCTS].seconds,
        "cpu_time_over_products": costs[BOTH].cpu_seconds / costs[PRODUCTS].cpu_seconds,
        "time_over_products_log_prob": costs[LOG_PROB].seconds / costs[PRODUCTS].seconds,
        "time_over_products_half_idle": costs[IDLE].seconds / costs[PRODUCTS].seconds,
    }


def work(args: argparse.Namespace) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, report = Console(quiet=dist.get_rank() > 0, width=120), {}
    on = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, a thread each"
    console.print(
        f"T = {args.tokens:,}, V = {args.vocabulary:,} over {dist.get_world_size()} processes, H = {args.hidden:,}, "
        f"{on}; medians of {args.repeats}.",
        highlight=False,
    )
    for dtype in args.dtype:
        say(dtype)
        x = Problem.draw(args.tokens, args.vocabulary, args.hidden, getattr(torch, dtype), device)
        costs = measure(x, args.repeats)
        console.print(table(dtype, costs, x.logits_bytes))
        report[dtype] = ratios(costs, x.logits_bytes) | {"costs": {name: asdict(cost) for name, cost in costs.items()}}
    if args.json is not None and dist.get_rank() == 0:
        worst = {key: max(report[dtype][key] for dtype in args.dtype) for key in ratios(costs, x.logits_bytes)}
        args.json.write_text(json.dumps(worst | report, indent=2) + "\n")
    dist.destroy_process_group()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.head", description="Time the output head.")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, default=2, help="processes; they share the vocabulary")
    parser.add_argument("--repeats", type=int, default=1, help="runs that the median is of; minutes each")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as well, worst dtype first")
    parser.add_argument("--quick", action="store_true", help="another default for sizes, dtypes and repeats: seconds")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(tokens=512, vocabulary=32768, dtype=["float32"], repeats=1)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse(sys.argv[1:])
    if under_torchrun():
        work(args)
    else:
        sys.exit(relaunch("tests.bench.head", args.ranks, sys.argv[1:]))


if __name__ == "__main__":
    main()
