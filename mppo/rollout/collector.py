"""The collector: draws prompts, has them answered and judged, and puts complete groups into the buffer.

Each prompt belongs to one rank, which asks the engine for all its answers, so that what they share is computed once.
Judging runs beside generation: a group is judged while others are still written.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mppo.batch.trajectory import Answer, Judgement, Purpose, Status, Trajectory, TrajectoryId
from mppo.errors import MppoError
from mppo.rollout.agents.session import Agent, Session
from mppo.rollout.buffer import Buffer
from mppo.rollout.engines.contract import RolloutEngine, SamplingParams
from mppo.rollout.prompt_group import Group
from mppo.rollout.prompts import Prompt, PromptStream
from mppo.rollout.reward_workers import RewardWorkers

T = TypeVar("T")


@dataclass(frozen=True)
class Asking:
    """How each prompt is asked."""

    samples: int
    """Answers to a prompt."""
    sampling: SamplingParams
    greedy: SamplingParams
    run_seed: int
    timeout_s: float
    """That one call of the engine may take."""
    validation: SamplingParams
    """Of held-out prompts."""
    validation_samples: int = 1
    """Answers to a held-out prompt."""
    with_baseline: bool = False
    """A greedy answer beside the samples, under the sample number that follows theirs."""
    prompts_per_draw: int = 1


class Collector:
    """Of one rank of `ranks`."""

    def __init__(
        self,
        engine: RolloutEngine,
        agent: Agent,
        rewards: RewardWorkers,
        asking: Asking,
        vocab_size: int,
        rank: int,
        ranks: int,
    ):
        self.engine, self.agent, self.rewards, self.asking = engine, agent, rewards, asking
        self.vocab_size, self.rank, self.ranks = vocab_size, rank, ranks
        self.loop = asyncio.Runner()
        """On which all that is asynchronous runs."""
        self.not_judged: list[tuple[Prompt, Trajectory]] = []
        """Answers over whose judgement a step was refused, for somebody to look at."""

    def collect(self, stream: PromptStream, buffer: Buffer) -> None:
        """Draw prompts, and put this rank's share of them, answered and judged, into the buffer.

        Raises what an engine, an agent or a reward raises.
        """
        drawn = stream.draw(self.asking.prompts_per_draw)
        mine = {number: prompt for number, prompt in drawn.items() if number % self.ranks == self.rank}
        self.loop.run(self._fill(mine, buffer))

    async def _fill(self, prompts: Mapping[int, Prompt], buffer: Buffer) -> None:
        async def one(number: int, prompt: Prompt) -> None:
            buffer.put(await self._group(number, prompt))

        await together(*(one(number, prompt) for number, prompt in prompts.items()))

    def validate(self, prompts: Mapping[int, Prompt]) -> list[Answer]:
        """Answers to this rank's share of held-out prompts, judged."""
        mine = {number: prompt for number, prompt in prompts.items() if number % self.ranks == self.rank}
        return self.loop.run(self._answers(mine))

    async def _answers(self, prompts: Mapping[int, Prompt]) -> list[Answer]:
        async def one(number: int, prompt: Prompt) -> list[Answer]:
            samples = range(self.asking.validation_samples)
            asked = [self._answer(number, sample, prompt, Purpose.VALIDATION) for sample in samples]
            return await self._judged(prompt, [t for answer in await together(*asked) for t in answer])

        found = await together(*(one(number, prompt) for number, prompt in prompts.items()))
        return [answer for answers in found for answer in answers]

    async def _group(self, number: int, prompt: Prompt) -> Group:
        """All answers to one prompt, judged together."""
        samples = self.asking.samples
        asked = [self._answer(number, sample, prompt, Purpose.SAMPLE) for sample in range(samples)]
        if self.asking.with_baseline:
            asked.append(self._answer(number, samples, prompt, Purpose.BASELINE))
        trajectories = [t for answer in await together(*asked) for t in answer]
        return Group(number, prompt, tuple(await self._judged(prompt, trajectories)))

    async def _answer(self, number: int, sample: int, prompt: Prompt, purpose: Purpose) -> list[Trajectory]:
        """What the agent makes of one sample."""
        asking = self.asking
        params = {
            Purpose.SAMPLE: asking.sampling,
            Purpose.BASELINE: asking.greedy,
            Purpose.VALIDATION: asking.validation,
        }[purpose]
        uid = TrajectoryId(number, sample)
        session = Session(self.engine, uid, params, asking.run_seed, asking.timeout_s, purpose)
        trajectories = await self.agent(prompt, session)
        for trajectory in trajectories:
            trajectory.validate(self.vocab_size)
        return trajectories

    async def _judged(self, prompt: Prompt, trajectories: list[Trajectory]) -> list[Answer]:
        """Aborted answers are not judged."""
        finished = [t for t in trajectories if t.status != Status.ABORTED]
        try:
            given = await self.rewards.judge([(t, prompt) for t in finished]) if finished else []
        except MppoError:
            self.not_judged += [(prompt, trajectory) for trajectory in finished]
            raise
        for trajectory, judgement in zip(finished, given, strict=True):
            judgement.validate(len(trajectory))
        judgements = {judgement.uid: judgement for judgement in given}
        return [Answer(t, judgements.get(t.uid, Judgement(t.uid, None))) for t in trajectories]

    def close(self) -> None:
        """End the worker processes of rewards and what the engine holds."""
        try:
            self.loop.run(self.engine.close())
        finally:
            self.rewards.close()
            self.loop.close()


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """All of it at once; when one raises, the others are cancelled and its error is raised, not a group of errors."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
