"""A trainer of two ranks with two servers, and how it asks them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mppo.batch.trajectory import TrajectoryId
from mppo.config import Config
from mppo.errors import EngineError
from mppo.rollout.engines.contract import Completion, Request, SamplingParams
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.server import Server
from mppo.trainer.assemble import assemble
from tests.sglang.cases import small_config, update

LENGTH = 400
PATIENT = ("rollout.sglang.health_timeout_s=4", "rollout.sglang.update_timeout_s=20")


class Scene:
    """A trainer of two ranks with two servers, and what happens to them."""

    def __init__(self, environment: Path, out_dir: Path):
        self.environment, self.out_dir = environment, out_dir
        self.run = assemble(self.small("rollout.sglang.servers=2"))
        self.engine: SglangEngine = self.run.rollouts.collector.engine
        self.version = -1

    def small(self, *overrides: str) -> Config:
        two = ("parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2")
        return small_config(self.environment, self.out_dir, *two, *PATIENT, *overrides)

    @property
    def servers(self) -> list[Server]:
        return list(self.engine.refitter.conductor.servers) if self.engine.refitter.conductor is not None else []

    def update(self, engine: SglangEngine | None = None) -> dict[int, str]:
        """The next version; returns the faults of servers, and which hold it."""
        self.version += 1
        update(self.run, engine or self.engine, self.version)
        return {m.number: m.fault for m in (engine or self.engine).fleet.members if m.version != self.version}

    def answers(self, engine: SglangEngine | None = None, after: Callable[[], None] | None = None, timeout_s=60.0):
        """What this rank is answered to eight prompts of four groups, while after 0.3 s something happens."""

        async def ask() -> list[Completion | str]:
            asked = [self.request(number, timeout_s) for number in range(8)]
            tasks = [asyncio.ensure_future((engine or self.engine).generate(request)) for request in asked]
            if after is not None:
                await asyncio.sleep(0.3)
                after()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            return [str(answer) if isinstance(answer, EngineError) else answer for answer in done]

        return self.run.rollouts.collector.loop.run(ask())

    def request(self, number: int, timeout_s: float) -> Request:
        uid = TrajectoryId(number // 2 + 100 * dist.get_rank(), number % 2)
        params = SamplingParams(LENGTH, temperature=0.0, ignore_eos=True)
        return Request(uid, tuple(range(5, 13 + number // 2)), params, (number,), timeout_s)

    def at_first(self, act: Callable[[], None]) -> Callable[[], None]:
        """On the first rank only."""
        return act if dist.get_rank() == 0 else lambda: None


def signalled(server: Server, number: int) -> Callable[[], None]:
    return lambda: os.killpg(server.process.pid, number)


def whole(answers: list[Any], versions: set[int]) -> bool:
    """Each is there once, complete, and of known weights."""
    return len(answers) == 8 and all(
        isinstance(a, Completion) and len(a.token_ids) == LENGTH and {s.weight_version for s in a.spans} <= versions
        for a in answers
    )
