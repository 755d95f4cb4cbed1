"""What an agent talks to: the engine, under the name of the answer that the agent is to give."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from mppo.batch.trajectory import Purpose, Span, Trajectory, TrajectoryId, Turn
from mppo.rollout.engines.contract import Completion, Request, RolloutEngine, SamplingParams
from mppo.rollout.prompts import Prompt


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
        """Continue these tokens, as the `turn`th call of the model for the trajectory number `part` of this session."""
        uid = TrajectoryId(self.uid.prompt, self.uid.sample, part)
        return await self.engine.generate(
            Request(uid, prompt_ids, self.params, (*uid.seed(self.run_seed), turn), self.timeout_s)
        )

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
