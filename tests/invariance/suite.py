"""Runs a choice of cases, layout by layout."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.distributed.model_folders import write_model
from tests.distributed.ranks import call_on_ranks
from tests.invariance.matrix import FOLDERS, Case, processes_of
from tests.invariance.worker import work_on

STEP_CASES = ("vanilla/token-mean", "gspo/seq-mean-token-mean", "value/token-mean")
"""Also compared after one optimizer step, with the distributed optimizer where there are data-parallel ranks."""


@dataclass(frozen=True)
class Result:
    """The errors of a case, relative to the largest entry of the truth: metrics, gradient, and after a step."""

    case: Case
    errors: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.errors.values())


def run_cases(
    cases: list[Case], dtype: str = "float32", say: Callable[[str], None] = lambda text: None
) -> list[Result]:
    """Make the truth on one process, then measure layout by layout."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in FOLDERS.values():
            write_model(name, work / name)
        say(f"the truth of {len({case.truth for case in cases})} losses and modes, on one process")
        _run(work, "dp1", cases, "float32")
        results = []
        for layout in dict.fromkeys(case.layout for case in cases):
            of_layout = [case for case in cases if case.layout == layout]
            say(f"{layout}: {len(of_layout)} cases on {processes_of(layout)} processes")
            errors = _run(work, layout, of_layout, dtype)
            results += [Result(case, errors[case.name]) for case in of_layout]
    return results


def _run(work: Path, layout: str, cases: list[Case], dtype: str) -> dict[str, dict[str, float]]:
    processes = 1 if layout == "dp1" else processes_of(layout)
    spec = {
        "layout": layout,
        "cases": [asdict(case) for case in cases],
        "models": str(work),
        "truth": str(work / "truth.pt"),
        "steps": STEP_CASES,
        "dtype": dtype,
    }
    return call_on_ranks(work_on, processes, spec, timeout=3600)[0]
