"""SGLang servers that mppo launches: each a process of its own Python environment, gone when its trainer is."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx

from mppo.config import SglangConfig
from mppo.errors import ConfigError, EngineError
from mppo.megatron import platform
from mppo.rollout.engines.sglang.shard_delivery import LOADER

OF_TRAINER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PYTHON", "VIRTUAL_ENV")
"""Variables of torchrun and of the trainer's Python: a server that saw them would join the trainer's processes."""
IN_WORKER = Path(__file__).parent / "in_worker"
"""What runs inside the servers' workers, and nothing else."""
ENDING_S = 5.0
"""Seconds that a server has to end by itself."""
TAIL = 2000
"""Characters of a server's log that an error shows."""


@dataclass(frozen=True)
class Place:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Server:
    """A launched server. It is killed with the process that launched it, however that ends."""

    def __init__(self, config: SglangConfig, number: int, model: Path, dtype: str, place: Place, log: Path):
        """Starts it; `ready` waits until it answers. Raises ConfigError where its environment is missing."""
        self.number, self.place, self.log, self.is_ready = number, place, log, False
        script = Path(config.environment) / "serve.sh"
        if not script.is_file():
            raise ConfigError(
                f"rollout.sglang.environment={config.environment} has no serve.sh: make the environment with"
                " launch/sglang.sh, or attach to servers that run (rollout.sglang.urls)"
            )
        self._command = [str(script), str(model), str(place.port), *arguments(config, place, dtype)]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        """Also again, after it ended."""
        self.is_ready = False
        seen = {name: value for name, value in os.environ.items() if not name.startswith(OF_TRAINER)}
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                env=seen | {"PYTHONPATH": str(IN_WORKER)},
            )

    async def has_ended(self, within_s: float = 0.0) -> bool:
        until = monotonic() + within_s
        while self.process.poll() is None and monotonic() < until:
            await asyncio.sleep(0.05)
        return self.process.poll() is not None

    async def ready(self, timeout_s: float) -> None:
        """Wait until it answers. Raises EngineError, with the end of its log, when it ends or does not in time."""
        until = monotonic() + timeout_s
        while monotonic() < until and not self.is_ready:
            if await self.has_ended():
                raise EngineError(f"{self.named} ended with {self.process.returncode}: {self.tail()}")
            await self.look()
            await asyncio.sleep(0 if self.is_ready else 0.5)
        if not self.is_ready:
            raise EngineError(f"{self.named} does not answer after {timeout_s:g} s: {self.tail()}")

    async def look(self) -> None:
        """Whether it answers by now."""
        async with httpx.AsyncClient(timeout=5.0) as http:
            try:
                self.is_ready = (await http.get(f"{self.place.url}/health")).status_code == 200
            except httpx.HTTPError:
                self.is_ready = False

    @property
    def named(self) -> str:
        return f"the SGLang server at {self.place.url} (log: {self.log})"

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-TAIL:] if self.log.exists() else ""

    async def close(self) -> None:
        """End it and all processes it made."""
        if self.process.poll() is None:
            _signal_group(self.process, signal.SIGTERM)
            await self.has_ended(ENDING_S)
        _signal_group(self.process, signal.SIGKILL)
        self.process.wait()


def arguments(config: SglangConfig, place: Place, dtype: str) -> Sequence[str]:
    """For `serve.sh`, after the model folder and the port."""
    tp, ep = config.tensor_parallel_size, config.expert_parallel_size
    own = ["--host", place.host, "--tp-size", str(tp), "--ep-size", str(ep), "--load-format", "dummy"]
    saver = ["--enable-memory-saver"] if config.colocated and platform.has_cuda() else []
    return [*own, "--dtype", dtype, "--custom-weight-loader", LOADER, *saver, *config.server_options]


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    """In the new process: the kernel kills it when its trainer dies. Its own children SGLang ends itself."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
