"""Judging answers beside generation: a reward function called for whole groups, many at once, under a deadline."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from mppo.batch.trajectory import Answer, Judgement, Trajectory
from mppo.config import RewardConfig
from mppo.errors import RewardError
from mppo.rollout.answer_text import AnswerText
from mppo.rollout.prompts import Prompt
from mppo.rollout.reward_calls import Failure, FailureKind, Outcome, call, failure_of, late, outcome_of, outcomes_of
from mppo.rollout.reward_pool import RewardPool
from mppo.rollout.rewards import RewardFunction, Rewards, Sample

RECENT, ENOUGH = 1000, 100
"""The rate of failures is taken over the latest RECENT answers, once there are ENOUGH."""


class RewardWorkers:
    """Judges the answers to one prompt after the other, or to many at the same time.

    Which function does, the prompt's data source says. A plain function runs in worker processes, or with
    `reward.workers=0` in this one; an `async` function runs in the caller's event loop, for all samples at once.
    """

    def __init__(self, rewards: Rewards, config: RewardConfig, text: AnswerText):
        self.rewards, self.config, self.text = rewards, config, text
        plain = [function for function in rewards.by_source.values() if not function.is_async]
        self._pool = RewardPool(plain, config.workers, config.timeout_s) if config.workers and plain else None
        self._counts: Counter[str] = Counter()
        self._recent: deque[bool] = deque(maxlen=RECENT)

    async def judge(self, group: list[tuple[Trajectory, Prompt]]) -> list[Judgement]:
        """Judgements of the answers to one prompt, in their order.

        Raises RewardError for an answer without a reward where `reward.on_error` says so, for a value that is no
        reward, and when more than `reward.max_failure_rate` of the latest answers failed.
        """
        if not group:
            return []
        source = group[0][1].source
        function = self.rewards.of(source)
        samples = [self._sample(trajectory, prompt) for trajectory, prompt in group]
        outcomes = await self._outcomes(function, samples)
        return [
            replace(self._judgement(trajectory, sample, outcome, function), source=source)
            for (trajectory, _), sample, outcome in zip(group, samples, outcomes, strict=True)
        ]

    def take_counts(self) -> dict[str, int]:
        """Answers judged since the last call, and how many of them failed: in all, and by the deadline."""
        counts, self._counts = self._counts, Counter()
        return {f"reward/{name}": counts[name] for name in ("samples", "failures", "timeouts")}

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def _sample(self, trajectory: Trajectory, prompt: Prompt) -> Sample:
        return Sample(
            prompt=prompt.text,
            response=self.text.of_actions(trajectory),
            ground_truth=prompt.ground_truth,
            fields=prompt.fields,
            token_ids=tuple(trajectory.token_ids.tolist()),
            action_mask=tuple(trajectory.action_mask.tolist()),
            prompt_number=trajectory.uid.prompt,
        )

    async def _outcomes(self, function: RewardFunction, samples: list[Sample]) -> list[Outcome]:
        if function.is_async:
            return await self._awaited(function, samples)
        return call(function, samples).outcomes if self._pool is None else await self._pool.call(function, samples)

    async def _awaited(self, function: RewardFunction, samples: list[Sample]) -> list[Outcome]:
        """Of an async function, in this event loop."""
        if function.batch:
            values = await self._in_time(function, samples)
            return [values] * len(samples) if isinstance(values, Failure) else outcomes_of(values, samples)
        return await asyncio.gather(*(self._await_one(function, sample) for sample in samples))

    async def _await_one(self, function: RewardFunction, sample: Sample) -> Outcome:
        value = await self._in_time(function, sample)
        return value if isinstance(value, Failure) else outcome_of(value, sample)

    async def _in_time(self, function: RewardFunction, argument: Sample | list[Sample]) -> Any:
        """What an async function returns, or why it does not."""
        try:
            async with asyncio.timeout(self.config.timeout_s) as deadline:
                return await function.call(argument)
        except Exception as error:
            return late(self.config.timeout_s) if deadline.expired() else failure_of(error)

    def _judgement(
        self, trajectory: Trajectory, sample: Sample, outcome: Outcome, function: RewardFunction
    ) -> Judgement:
        self._count(outcome)
        if isinstance(outcome, Failure):
            self._refuse(_named(function, trajectory, sample), outcome)
            score = self.config.error_score if self.config.on_error == "score" else None
            return Judgement(trajectory.uid, score, accuracy=0.0, parts={}, token_rewards=None)
        token_rewards = None if outcome.token_rewards is None else torch.tensor(outcome.token_rewards)
        accuracy = outcome.score if outcome.accuracy is None else outcome.accuracy
        return Judgement(trajectory.uid, outcome.score, accuracy, outcome.parts, token_rewards)

    def _count(self, outcome: Outcome) -> None:
        self._counts["samples"] += 1
        self._recent.append(isinstance(outcome, Failure))
        if isinstance(outcome, Failure):
            self._counts["failures"] += 1
            self._counts["timeouts"] += outcome.kind == FailureKind.TIMED_OUT

    def _refuse(self, where: str, failure: Failure) -> None:
        """Raise RewardError where the run is not to go on without this reward."""
        if failure.kind == FailureKind.REFUSED:
            raise RewardError(f"{where}: {failure.message}")
        if self.config.on_error == "raise":
            raise RewardError(f"{where}: {failure.message}; reward.on_error=abstain leaves such answers out")
        failed, judged = sum(self._recent), len(self._recent)
        if judged >= ENOUGH and failed > self.config.max_failure_rate * judged:
            raise RewardError(
                f"{failed} of the latest {judged} answers got no reward, more than reward.max_failure_rate="
                f"{self.config.max_failure_rate:g}; the last: {where}: {failure.message}"
            )


def _named(function: RewardFunction, trajectory: Trajectory, sample: Sample) -> str:
    return (
        f"reward {function.name!r} of {trajectory.uid}, prompt {sample.prompt[-200:]!r},"
        f" answer {sample.response[:200]!r}"
    )


def check_parts(answers: Iterable[Answer], keys: tuple[str, ...]) -> None:
    """Raise RewardError for an answer without one of the named parts of the reward that the estimator reads."""
    for answer in answers:
        parts = answer.judgement.parts
        for key in keys:
            if key not in parts:
                raise RewardError(
                    f"{answer.trajectory.uid}: the reward function reported no part {key!r}, which"
                    f" algorithm.adv_options names; it reported {', '.join(sorted(parts)) or 'none'}"
                )
