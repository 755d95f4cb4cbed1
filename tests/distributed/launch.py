"""Running a worker script under a real torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TAIL = 8000
"""Characters; torchrun itself adds about 3000 after a worker's traceback."""


def torchrun(script: str, processes: int, *arguments: Any, timeout: float = 300) -> str:
    """What a script of this folder printed, run by torchrun on a free port; fails with the tail of it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    process = subprocess.Popen(
        [*launcher, str(HERE / script), *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers before itself
        output, _ = process.communicate()
        raise AssertionError(f"{script} ran for more than {timeout} seconds:\n{output[-TAIL:]}") from None
    assert process.returncode == 0, f"{script} on {processes} processes failed:\n{output[-TAIL:]}"
    return output


def torchrun_results(script: str, processes: int, results: Path, *arguments: Any, timeout: float = 300) -> Any:
    """What the script wrote as JSON to the path it was given as its first argument."""
    torchrun(script, processes, results, *arguments, timeout=timeout)
    return json.loads(results.read_text())


def environment() -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
