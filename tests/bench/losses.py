"""How long policy losses and advantage estimators take: `python -m tests.bench.losses`.

A loss is timed forward and backward to the log-probs, under the token weights of its own aggregation mode, which are
made beforehand as in training. Float32, on the GPU where there is one. Before anything is timed, the padded
formulation must give what the packed one gives; that of a loss is the same function over `[B * T]` vectors.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mppo.algorithm.advantages import ESTIMATORS
from mppo.algorithm.aggregation import token_weights
from mppo.algorithm.policy_losses import POLICY_LOSSES, PolicyInputs, PolicyLoss, policy_loss
from tests.bench.batch import RESPONSES, REWARD_PARTS, BenchBatch, draw_batch
from tests.bench.padded import PADDED, padded_inputs

LOSS_KNOBS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}
ESTIMATOR_KNOBS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 1.0, "lam": 0.95},
    "gdpo": {"gdpo_reward_keys": list(REWARD_PARTS)},
    "reinforce_plus_plus": {"gamma": 0.999},
}
"""All other knobs are at their defaults."""
LOSS_REFERENCE, ESTIMATOR_REFERENCE = "vanilla", "grpo"
NO_PADDED = "no padded formulation of it is written in tests/bench/padded.py, so there is nothing to compare with"


@dataclass(frozen=True)
class Timing:
    """Medians, in milliseconds."""

    ms: float
    padded_ms: float | None
    prepare_ms: float | None = None

    @property
    def over_padded(self) -> float | None:
        return None if self.padded_ms is None else self.ms / self.padded_ms


def median_ms(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Of `repeats` runs, each until the device has finished."""

    def once() -> float:
        start = perf_counter()
        run()
        _finish(device)
        return 1e3 * (perf_counter() - start)

    _finish(device)
    return median(once() for _ in range(repeats))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_same(what: str, packed: Tensor, padded: Tensor) -> None:
    """Raise AssertionError unless they are close, by the scale of the largest."""
    scale = float(packed.abs().max())
    torch.testing.assert_close(
        padded.to(packed.dtype), packed, rtol=1e-4, atol=1e-5 * scale, msg=lambda text: f"{what}: {text}"
    )


def time_loss(name: str, batch: BenchBatch, repeats: int) -> Timing:
    device = batch.policy.mask.device
    loss = policy_loss(name, LOSS_KNOBS.get(name))
    x, prepare_ms = batch.policy, None
    if loss.needs_mini_batch:
        mini_batch = batch.mini_batch
        x = replace(x, prepared=loss.prepare(mini_batch))
        prepare_ms = median_ms(lambda: loss.prepare(mini_batch), repeats, device)

    packed = training_pass(loss, x, batch)
    padded = training_pass(loss, batch.padding.policy_inputs(x), batch)
    (packed_loss, packed_gradient), (padded_loss, padded_gradient) = packed(), padded()
    check_same(f"loss of {name}", packed_loss, padded_loss)
    check_same(f"gradient of {name}", packed_gradient, batch.padding.unpad(padded_gradient))
    return Timing(median_ms(packed, repeats, device), median_ms(padded, repeats, device), prepare_ms)


def training_pass(loss: PolicyLoss, x: PolicyInputs, batch: BenchBatch) -> Callable[[], tuple[Tensor, Tensor]]:
    """A closure that returns the loss, 0-dim, and its gradient with respect to the log-probs."""
    weights = token_weights(loss.loss_agg_mode, x.mask, x.segments, batch.counts, RESPONSES.cap)

    def run() -> tuple[Tensor, Tensor]:
        log_probs = x.log_probs.detach().requires_grad_()
        token_loss = loss(replace(x, log_probs=log_probs)).loss
        total = (torch.where(x.mask, token_loss, 0.0) * weights).sum()
        (gradient,) = torch.autograd.grad(total, log_probs)
        return total.detach(), gradient

    return run


def time_estimator(name: str, batch: BenchBatch, repeats: int) -> Timing:
    x, padding, device = batch.advantage, batch.padding, batch.advantage.action_mask.device
    knobs = ESTIMATOR_KNOBS.get(name, {})
    estimator = ESTIMATORS.get(name).bind(knobs, "adv_options")
    result = estimator(x)
    ms = median_ms(lambda: estimator(x), repeats, device)
    if name not in PADDED:
        return Timing(ms, None)

    rows = padded_inputs(x, padding)
    advantages, returns = PADDED[name](rows, **knobs)
    check_same(f"advantages of {name}", result.advantages[x.action_mask], padding.unpad(advantages)[x.action_mask])
    check_same(f"returns of {name}", result.returns[x.action_mask], padding.unpad(returns)[x.action_mask])
    return Timing(ms, median_ms(lambda: PADDED[name](rows, **knobs), repeats, device))


def measure(time: Callable[[str], Timing], names: list[str], reference: str) -> dict[str, Timing]:
    """Timings by name, of the reference too if it is not among them."""
    timings = {}
    for name in dict.fromkeys([reference, *names]):
        timings[name] = time(name)
        print(f"{name}: {timings[name].ms:.1f} ms", file=sys.stderr, flush=True)
    return timings


def table(title: str, timings: dict[str, Timing], names: list[str], reference: str) -> Table:
    """A line for each name; times of `prepare` in a column of their own where one has it."""
    with_prepare = any(timings[name].prepare_ms is not None for name in names)
    columns = ["ms", *(["prepare ms"] if with_prepare else []), f"over {reference}", "padded ms", "over padded"]
    result = Table("name", title=title, title_justify="left")
    for column in columns:
        result.add_column(column, justify="right")
    for name in names:
        t = timings[name]
        cells = [_number(t.ms, 1), *([_number(t.prepare_ms, 1)] if with_prepare else [])]
        cells += [_number(t.ms / timings[reference].ms, 2), _number(t.padded_ms, 1), _number(t.over_padded, 2)]
        result.add_row(name, *cells)
    missing = [name for name in names if timings[name].padded_ms is None]
    if missing:
        result.caption = f"{', '.join(missing)}: {NO_PADDED}"
    return result


def _number(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def as_json(timings: dict[str, Timing], names: list[str], reference: str) -> dict[str, dict[str, float | None]]:
    base = timings[reference].ms
    return {
        name: {
            "ms": timings[name].ms,
            f"over_{reference}": timings[name].ms / base,
            "over_padded": timings[name].over_padded,
        }
        for name in names
    }


def describe(batch: BenchBatch) -> str:
    """What was measured, in one paragraph."""
    rows, width = batch.padding.valid.shape
    device = batch.policy.mask.device
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    off = 1.0 - batch.counts.loss_tokens / batch.tokens
    return (
        f"{batch.tokens:,} packed tokens in {rows:,} trajectories, {off:.0%} masked off.\n"
        f"Padded: {rows:,} x {width:,} positions, {batch.padding.share:.0%} of them padding; same results.\n"
        f"Float32 on {on}. Ratios are packed time over the other:\n"
        "below 1, packed is the faster one."
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.losses", description="Time losses and estimators.")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="packed positions, at least")
    parser.add_argument("--repeats", type=int, default=5, help="runs that the median is of")
    parser.add_argument("--json", type=Path, help="write the numbers to this file as well")
    parser.add_argument("--losses", type=names, default=POLICY_LOSSES.names(), help="names, separated by commas")
    parser.add_argument("--estimators", type=names, default=ESTIMATORS.names(), help="names, separated by commas")
    parser.add_argument("--quick", action="store_true", help="another default for tokens and repeats: seconds")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(tokens=100_000, repeats=3)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    batch = draw_batch(args.tokens, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    losses = measure(lambda name: time_loss(name, batch, args.repeats), args.losses, LOSS_REFERENCE)
    estimators = measure(lambda name: time_estimator(name, batch, args.repeats), args.estimators, ESTIMATOR_REFERENCE)

    console = Console()
    console.print(describe(batch), highlight=False)
    console.print(table("Policy losses, forward and backward", losses, args.losses, LOSS_REFERENCE))
    console.print(table("Estimators", estimators, args.estimators, ESTIMATOR_REFERENCE))
    if args.json is not None:
        numbers = {
            "tokens": batch.tokens,
            "padding_share": batch.padding.share,
            "losses": as_json(losses, args.losses, LOSS_REFERENCE),
            "estimators": as_json(estimators, args.estimators, ESTIMATOR_REFERENCE),
        }
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
