"""A benchmark on several processes: it starts itself again under torchrun."""

import os
import subprocess
import sys


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def relaunch(module: str, processes: int, arguments: list[str]) -> int:
    """Run the module under torchrun, one thread to a process, with what it prints coming through; the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "9"}
    return subprocess.run([*launcher, "-m", module, *arguments], env=environment, check=False).returncode
