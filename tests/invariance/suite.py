"""Launches the workers of a choice of cases, and reads what they found."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.distributed.launch import torchrun
from tests.distributed.model_folders import write_model
from tests.invariance.matrix import FOLDERS, Case, processes_of

WORKER = Path(__file__).parent / "worker.py"
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
        _launch(work, "dp1", cases, "float32")
        results = []
        for layout in dict.fromkeys(case.layout for case in cases):
            of_layout = [case for case in cases if case.layout == layout]
            say(f"{layout}: {len(of_layout)} cases on {processes_of(layout)} processes")
            errors = _launch(work, layout, of_layout, dtype)
            results += [Result(case, errors[case.name]) for case in of_layout]
    return results


def _launch(work: Path, layout: str, cases: list[Case], dtype: str) -> dict[str, dict[str, float]]:
    spec = {
        "layout": layout,
        "cases": [asdict(case) for case in cases],
        "models": str(work),
        "truth": str(work / "truth.pt"),
        "results": str(work / f"{layout}.json"),
        "steps": STEP_CASES,
        "dtype": dtype,
    }
    path = work / f"{layout}.spec.json"
    path.write_text(json.dumps(spec))
    processes = 1 if layout == "dp1" else processes_of(layout)
    torchrun(str(WORKER), processes, path, timeout=3600)
    return json.loads(Path(spec["results"]).read_text()) if layout != "dp1" else {}
