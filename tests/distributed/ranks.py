"""Functions on several processes that find each other as under torchrun, without the cost of its launch.

A fork server imports torch, Megatron-core and mppo once (preloaded.py); each rank of each case is a process of its own,
forked from it. So no state is left over from the case before, and a rank that dies or hangs spoils its case only.
"""

import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

GRACE = 10.0
"""Seconds that the others have to end by themselves after a rank has failed."""
TAIL = 8000
"""Characters of each rank's output that a failed test shows."""


@dataclass(frozen=True)
class Ended:
    """How every rank ended: its exit code (negative: the signal that killed it), what it printed and returned."""

    exit_codes: list[int]
    outputs: list[str]
    returned: list[Any]

    @property
    def output(self) -> str:
        return "".join(self.outputs)

    @property
    def tails(self) -> str:
        """The end of what each rank printed, for a failed test."""
        ranks = enumerate(zip(self.exit_codes, self.outputs, strict=True))
        return "\n".join(f"--- rank {rank}, exit code {code}:\n{output[-TAIL:]}" for rank, (code, output) in ranks)


def call_on_ranks(function: Callable[..., Any], processes: int, *arguments: Any, timeout: float = 300) -> list[Any]:
    """What `function(*arguments)` returned on every rank; fails with the tail of what they printed."""
    ended = run_on_ranks(function, processes, *arguments, timeout=timeout)
    assert not any(ended.exit_codes), f"{function.__name__} on {processes} processes failed:\n{ended.tails}"
    return ended.returned


def run_on_ranks(function: Callable[..., Any], processes: int, *arguments: Any, timeout: float = 300) -> Ended:
    """Run a module's function on every rank, with torchrun's environment, until all end or `timeout` seconds are over.

    Like torchrun, ends all when one has failed. Arguments and what is returned must be picklable.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of this case alone, on a free port
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            _context().Process(
                target=_run_rank, args=(folder, rank, _environment(rank, processes, store.port), function, arguments)
            )
            for rank in range(processes)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, timeout)
        finally:
            _kill(ranks)
        return Ended(
            exit_codes=[process.exitcode for process in ranks],
            outputs=[_read(folder / f"{rank}.out").decode(errors="replace") for rank in range(processes)],
            returned=[pickle.loads(_read(folder / f"{rank}.pickle") or _NONE) for rank in range(processes)],
        )


_NONE = pickle.dumps(None)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@functools.cache
def _context() -> BaseContext:
    """On a GPU, whose context survives no fork, every rank is started and imports by itself."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    return context


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Of torchrun on one machine; the store is the parent's, as under torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run_rank(folder: Path, rank: int, environment: dict[str, str], function: Callable, arguments: tuple) -> None:
    with open(folder / f"{rank}.out", "wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    returned = function(*arguments)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(returned))


def _wait(ranks: list[BaseProcess], timeout: float) -> None:
    """Until all have ended, or one has failed and the others have had a moment to say why they cannot go on."""
    running = {process.sentinel: process for process in ranks}
    deadline = time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + GRACE)


def _kill(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
