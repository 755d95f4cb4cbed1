"""`python -m tests.invariance`: how far gradients, losses and metrics of every layout are from those of one process.

python -m tests.invariance                                      the whole matrix
python -m tests.invariance --covering                           the subset that CI runs
python -m tests.invariance --layouts tp2,cp2 --losses gspo      any part of it
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.invariance.matrix import CUTS, LOSSES, MODES, all_cases, covering_cases, known_layouts
from tests.invariance.suite import Result, run_cases

LIMIT = 1e-6
WIDTH = 200
"""Characters that the table of all losses needs."""


def main() -> int:
    options = _parse()
    choose = covering_cases if options.covering else all_cases
    cases = choose(options.layouts, options.losses, options.modes, options.cuts)
    console = Console(width=WIDTH)
    results = run_cases(cases, options.dtype, lambda text: console.print(text, highlight=False))
    print_matrix(results, console)
    worst = max(results, key=lambda result: result.worst)
    console.print(f"worst: {worst.worst:.1e}, {worst.case.name}", highlight=False)
    if options.json:
        Path(options.json).write_text(json.dumps(report(results), indent=1))
    return 0 if worst.worst <= options.limit else 1


def _parse() -> argparse.Namespace:
    layouts = known_layouts()
    parser = argparse.ArgumentParser("python -m tests.invariance", description=__doc__.splitlines()[0])
    for name, known in (("layouts", layouts), ("losses", LOSSES), ("modes", MODES), ("cuts", CUTS)):
        parser.add_argument(f"--{name}", default=",".join(known), help=f"comma-separated (default: {', '.join(known)})")
    parser.add_argument("--covering", action="store_true", help="each layout with each loss, modes and cuts in turn")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest relative error that passes")
    parser.add_argument("--json", metavar="FILE", help="where to write all errors")
    options = parser.parse_args()
    for name, known in (("layouts", layouts), ("losses", LOSSES), ("modes", MODES), ("cuts", CUTS)):
        chosen = getattr(options, name).split(",")
        for item in chosen:
            if item not in known:
                parser.error(f"--{name}: unknown {item!r}; known: {', '.join(known)}")
        setattr(options, name, chosen)
    return options


def print_matrix(results: list[Result], console: Console) -> None:
    """The worst error of each layout and loss, over modes and cuts."""
    losses = list(dict.fromkeys(result.case.loss for result in results))
    table = Table(title="largest relative error: gradients, losses, metrics, parameters after a step")
    table.add_column("layout")
    for loss in losses:
        table.add_column(loss, justify="right")
    for layout in dict.fromkeys(result.case.layout for result in results):
        row = []
        for loss in losses:
            errors = [r.worst for r in results if (r.case.layout, r.case.loss) == (layout, loss)]
            row.append(f"{max(errors):.0e}" if errors else "-")
        table.add_row(layout, *row)
    console.print(table)


def report(results: list[Result]) -> dict:
    """What `--json` writes."""
    worst = max(results, key=lambda result: result.worst)
    return {
        "worst_relative_error": worst.worst,
        "worst_case": asdict(worst.case),
        "cases": [{**asdict(result.case), "errors": result.errors} for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
