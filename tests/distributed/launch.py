"""Real launches by torchrun, for the few tests that are about the launch; the others start their ranks by ranks.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
TAIL = 8000
"""Characters; torchrun itself adds about 3000 after a worker's traceback."""


def torchrun(processes: int, *command: Any, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m` and a module, by torchrun on a free port; what it printed is in `stdout`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    process = subprocess.Popen(
        [*launcher, *map(str, command)],
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
        raise AssertionError(f"{command} ran for more than {timeout} seconds:\n{output[-TAIL:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def torchrun_succeeds(processes: int, *command: Any, timeout: float = 300) -> str:
    """What the command printed; fails with the tail of it unless the exit code is 0."""
    finished = torchrun(processes, *command, timeout=timeout)
    assert finished.returncode == 0, f"{command} on {processes} processes failed:\n{finished.stdout[-TAIL:]}"
    return finished.stdout


def environment() -> dict[str, str]:
    """In which a script, which has only its own folder on the path, finds the packages of the repository."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
