"""Real runs of `mppo train` on several processes, and what they wrote."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.cli.main import main
from tests.distributed.launch import torchrun_succeeds
from tests.distributed.ranks import run_on_ranks


@dataclass(frozen=True)
class Run:
    """A finished run: what it printed and its rows of metrics."""

    output: str
    out_dir: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out_dir / "metrics.jsonl").read_text().splitlines()]

    def column(self, name: str) -> list[float]:
        """Fails for a metric that the run never reported: two empty columns would agree."""
        found = [row[name] for row in self.rows if name in row]
        assert found, f"{name} is in no row of {self.out_dir}"
        return found


def train(config: str, processes: int, out_dir: Path, *overrides: str, timeout: float = 600) -> Run:
    """Run a shipped configuration to its end; fails with the tail of its output."""
    return _finished(_arguments("train", config, out_dir, overrides), processes, timeout)


def sft(config: str, processes: int, out_dir: Path, *overrides: str, timeout: float = 300) -> Run:
    """The same of `mppo sft`."""
    return _finished(_arguments("sft", config, out_dir, overrides), processes, timeout)


def train_refused(config: str, processes: int, out_dir: Path, *overrides: str, timeout: float = 300) -> str:
    """Run a configuration that every rank must refuse, with exit code 2; returns what they printed."""
    return _refused(_arguments("train", config, out_dir, overrides), processes, timeout)


def sft_refused(config: str, processes: int, out_dir: Path, *overrides: str, timeout: float = 300) -> str:
    """The same of `mppo sft`."""
    return _refused(_arguments("sft", config, out_dir, overrides), processes, timeout)


def train_killed(config: str, processes: int, out_dir: Path, *overrides: str) -> None:
    """Run a configuration whose processes are killed in the midst of their work, once a first checkpoint is there."""
    latest = out_dir / "checkpoints" / "latest"
    ended = run_on_ranks(_command_until, processes, _arguments("train", config, out_dir, overrides), latest)
    assert set(ended.exit_codes) == {-signal.SIGKILL}, f"{config} ended by itself:\n{ended.tails}"


def train_under_torchrun(config: str, processes: int, out_dir: Path, *overrides: str) -> Run:
    """Like `train`, by the command line that a user types."""
    output = torchrun_succeeds(processes, "-m", "mppo", *_arguments("train", config, out_dir, overrides), timeout=600)
    return Run(output, out_dir)


def _arguments(command: str, config: str, out_dir: Path, overrides: tuple[str, ...]) -> list[str]:
    return [command, "--config-name", config, f"trainer.out_dir={out_dir}", *overrides]


def _finished(arguments: list[str], processes: int, timeout: float) -> Run:
    ended = run_on_ranks(_command, processes, arguments, timeout=timeout)
    assert not any(ended.exit_codes), f"{arguments} on {processes} processes failed:\n{ended.tails}"
    return Run(ended.output, Path(arguments[3].removeprefix("trainer.out_dir=")))


def _refused(arguments: list[str], processes: int, timeout: float) -> str:
    ended = run_on_ranks(_command, processes, arguments, timeout=timeout)
    assert set(ended.exit_codes) == {2}, f"{arguments} was not refused:\n{ended.tails}"
    return ended.output


def _command(arguments: list[str]) -> None:
    """The `mppo` command, exit code included."""
    sys.exit(main(arguments))


def _command_until(arguments: list[str], path: Path) -> None:
    """The `mppo` command, killed when the file is there."""

    def kill() -> None:
        while not path.is_file():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    _command(arguments)
