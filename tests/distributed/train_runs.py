"""Real runs of `mppo train` under torchrun, and what they wrote."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.launch import TAIL, environment


@dataclass(frozen=True)
class Run:
    """A finished run: what it printed and its rows of metrics."""

    output: str
    out_dir: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out_dir / "metrics.jsonl").read_text().splitlines()]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


def train(config: str, processes: int, out_dir: Path, *overrides: str, timeout: float = 600) -> Run:
    """Run a shipped configuration to its end; fails with the tail of its output."""
    finished = _start(config, processes, out_dir, overrides, timeout)
    assert finished.returncode == 0, f"{config} on {processes} processes failed:\n{finished.stdout[-TAIL:]}"
    return Run(finished.stdout, out_dir)


def train_refused(config: str, processes: int, out_dir: Path, *overrides: str, timeout: float = 300) -> str:
    """Run a configuration that must be refused; returns what it printed."""
    finished = _start(config, processes, out_dir, overrides, timeout)
    assert finished.returncode != 0, f"{config} was not refused:\n{finished.stdout[-TAIL:]}"
    return finished.stdout


def _start(config, processes, out_dir, overrides, timeout) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = ["-m", "mppo", "train", "--config-name", config, f"trainer.out_dir={out_dir}", *overrides]
    return subprocess.run(
        [*launcher, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
