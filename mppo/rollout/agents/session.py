"""What an agent talks to: the engine, under the name of the answer that the agent is to give."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from mppo.batch.trajectory import Purpose, Span, Trajectory, TrajectoryId, Turn
from mppo.errors import EngineError
from mppo.rollout.engines.contract import Completion, Request, RolloutEngine, SamplingParams
from mppo.rollout.prompts import Prompt

GRACE_S = 30.0
"""Seconds after its deadline in which an engine is to answer that it gave up."""


@dataclass(frozen=True)
class Session:
    """One answer to one prompt of the run."""

    engine: RolloutEngine
    uid: TrajectoryId
    params: SamplingParams
    run_seed: int
    timeout_s: float
    """Of each call of the engine."""
    purpose: Purpose = Purpose.SAMPLE

    async def complete(self, prompt_ids: tuple[int, ...], part: int = 0, turn: int = 0) -> Completion:
        """Continue these tokens, as the `turn`th call of the model for the trajectory number `part` of this session.

        Raises EngineError where the engine does not even give up in time.
        """
        uid = TrajectoryId(self.uid.prompt, self.uid.sample, part)
        request = Request(uid, prompt_ids, self.params, (*uid.seed(self.run_seed), turn), self.timeout_s)
        try:
            async with asyncio.timeout(self.timeout_s + GRACE_S):
                return await self.engine.generate(request)
        except TimeoutError as error:
            raise EngineError(
                f"no answer to {uid} within rollout.timeout_s={self.timeout_s:g} and {GRACE_S:g} seconds more"
            ) from error

    def trajectory(self, prompt_ids: tuple[int, ...], completion: Completion) -> Trajectory:
        """A trajectory of one turn: a prompt and what the engine wrote after it."""
        before, written = len(prompt_ids), len(completion.token_ids)
        return Trajectory(
            uid=self.uid,
            token_ids=torch.tensor([*prompt_ids, *completion.token_ids]),
            action_mask=torch.arange(before + written) >= before,
            rollout_log_probs=torch.cat([torch.zeros(before), torch.tensor(completion.log_probs)]),
            spans=tuple(Span(before + s.start, before + s.stop, s.weight_version) for s in completion.spans),
            turns=(Turn(before, before + written),),
            status=completion.status,
            purpose=self.purpose,
        )


Agent = Callable[[Prompt, Session], Awaitable[list[Trajectory]]]
"""Answers a prompt; a session may give several trajectories, which keep the name of its answer and differ in `part`."""
