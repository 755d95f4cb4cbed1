"""Refits of SGLang servers: `python -m tests.bench.refit --environment FOLDER [--json FILE]`.

A TP2 x PP2 (x EP2) actor gives its weights to a server of 1 and of 2 workers, by every transport. In the same run:

- the speed of `shards` against a raw gloo send: the same bytes, from as many processes to as many, nothing packed and
  nothing kept (`raw_send.py`). Both take turns; medians are compared.
- what each worker received, by its own count, against its parameters once, and of a delta against 2 + 4 bytes for each
  element that changed, which is found by comparing all weights before and after.
- the speed of `delta` against `shards` where everything goes through one link of 100 Mbit/s: all runs in a network
  namespace of its own, whose loopback device `tc` limits. Whole refits and transfers alone are compared; the worse
  counts.
- the share of bf16 elements that change in an optimizer step of RL, on a small model that is trained
  (`changed_share.py`). In the refits so large a share of the elements changes, anywhere.

Headlines are the worst of all cases. It needs root (for the namespace), `unshare`, `ip` and `tc`.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.namespace import inside_namespace, reenter
from tests.bench.relaunch import relaunch, under_torchrun

MODULE = "tests.bench.refit"
MBIT = 100
GOALS = {
    "shards_received_over_minimum": "at most 1.001",
    "shards_speed_over_raw_send": "at least 0.5",
    "delta_bytes_over_changed": "at most 1.1",
    "delta_speed_over_shards": "at least 5",
}


def headlines(cases: list[dict[str, Any]]) -> dict[str, float]:
    """The worst of all cases."""
    shards = [case for case in cases if case["transport"] == "shards"]
    deltas = [case for case in cases if case["transport"] == "delta"]
    pairs = list(zip(shards, deltas, strict=True))
    return {
        "shards_received_over_minimum": max(case["received_over_minimum"] for case in shards),
        "shards_speed_over_raw_send": min(case["raw_send_seconds"] / case["transfer_seconds"] for case in shards),
        "delta_bytes_over_changed": max(max(case["delta_bytes_over_changed"].values()) for case in deltas),
        "delta_speed_over_shards": min(
            whole[name] / delta[name]
            for whole, delta in pairs
            for name in ("throttled_seconds", "throttled_transfer_seconds")
        ),
    }


def table(cases: list[dict[str, Any]]) -> Table:
    result = Table("model", title="Refits; MB beside the model", title_justify="left")
    for column in ("workers", "transport", "s", "transfer", "raw send", "100 Mbit/s", "on the link", "rank", "worker"):
        result.add_column(column, justify="right")
    for case in cases:
        slow, raw = (f"{case[name]:.3f}" if case[name] else "" for name in ("throttled_seconds", "raw_send_seconds"))
        sizes = (f"{case[name] / 1e6:.0f}" for name in ("link_bytes", "rank_peak_bytes", "worker_peak_bytes"))
        name = f"{case['model']}, {case['model_bytes'] / 1e6:.0f} MB"
        times = (f"{case['seconds']:.3f}", f"{case['transfer_seconds']:.3f}", raw, slow)
        result.add_row(name, str(case["workers"]), case["transport"], *times, *sizes)
    return result


def shares_of_steps(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measured here, or what an earlier measurement wrote."""
    if options.shares is not None:
        return json.loads(options.shares.read_text())
    console.print("the share of elements that an optimizer step changes", highlight=False)
    found = folder / "shares.json"
    arguments = ["--json", str(found), "--warm", str(options.warm)]
    if code := relaunch("tests.bench.changed_share", 1, arguments):
        sys.exit(code)
    return json.loads(found.read_text())


def launch(options: argparse.Namespace) -> None:
    """The process that starts the others."""
    from tests.bench.refit_worker import RANKS, Settings

    console, start = Console(stderr=True, width=120), perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        measured = shares_of_steps(folder, options, console)
        shares = {lr: found["share_max"] for lr, found in measured["of_lr"].items()}
        settings = Settings(
            environment=str(options.environment.resolve()),
            folder=name,
            repeats=options.repeats,
            mbit=MBIT,
            shares=shares,
            models=options.models,
            workers=options.workers,
            overrides=options.overrides,
        )
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        if code := relaunch(MODULE, RANKS, ["--environment", settings.environment, "--folder", name]):
            sys.exit(code)
        cases = json.loads((folder / "cases.json").read_text())
    found = headlines(cases)
    seconds = perf_counter() - start
    Console(width=120).print(table(cases))
    for key, goal in GOALS.items():
        print(f"{key}: {found[key]:.4g} ({goal})")
    for lr, share in shares.items():
        print(f"elements that a step at {lr} changes: {share:.2%}")
    if options.json is not None:
        about = {"shares_of_changed_elements": measured, "throttled_mbit": MBIT, "bench_seconds": seconds}
        options.json.write_text(json.dumps(found | about | {"cases": cases}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {MODULE}", description=__doc__.splitlines()[0])
    named = os.environ.get("MPPO_SGLANG_ENV")
    parser.add_argument(
        "--environment", type=Path, default=named, required=named is None, help="made by launch/sglang.sh"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3-moe"], help="llama, qwen3-moe")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="of a server: its --tp-size")
    parser.add_argument("--overrides", nargs="+", default=[], help="fields to set: rollout.sglang.buffer_mb=64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", type=int, default=200, help="steps of RL before changed elements are counted")
    parser.add_argument("--shares", type=Path, help="what tests.bench.changed_share wrote, instead of measuring that")
    parser.add_argument("--folder", type=Path, help="where to put what is written meanwhile (default: the system's)")
    parser.add_argument("--quick", action="store_true", help="another default for models, workers, repeats and warm")
    if parser.parse_args().quick:
        parser.set_defaults(models=["llama"], workers=[2], repeats=2, warm=20)
    options = parser.parse_args()
    if under_torchrun():
        from tests.bench.refit_worker import Settings, work

        work(Settings(**json.loads((options.folder / "settings.json").read_text())), options.folder / "cases.json")
    elif not inside_namespace():
        sys.exit(reenter(MODULE, sys.argv[1:]))
    else:
        launch(options)


if __name__ == "__main__":
    main()
