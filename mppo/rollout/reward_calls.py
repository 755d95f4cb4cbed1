"""A reward function called, and what it returns or raises made into a Reward or a Failure. Runs in worker processes."""

import fcntl
import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from pathlib import Path
from typing import Any

from mppo.rollout.rewards import Reward, RewardFunction, Sample


class FailureKind(StrEnum):
    RAISED = "raised"
    """An exception, or the worker process died."""
    TIMED_OUT = "timed out"
    NO_SCORE = "no score"
    """None, or a number that is not finite."""
    REFUSED = "refused"
    """A value of a class that no reward can be made of: a mistake in the function, whatever reward.on_error says."""


@dataclass(frozen=True)
class Failure:
    """Why a sample has no reward."""

    kind: FailureKind
    message: str


Outcome = Reward | Failure


@dataclass(frozen=True)
class CallResult:
    outcomes: list[Outcome]
    seconds: float
    """Of all calls together."""


def prepare_worker(functions: tuple[RewardFunction, ...]) -> None:
    """What a worker does first: no process is left behind that a long C call keeps busy, and no import is timed.

    The functions themselves are imported when they are unpickled.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of Python's would wait for the C call
    _end_with_trainer()
    for package in {package for function in functions for package in function.packages}:
        importlib.import_module(package)


def _end_with_trainer() -> None:
    """Have Linux end this process with the trainer, however that ends: at the end of file of the pipe between them the
    kernel sends SIGIO, which nothing handles. (A thread that watches the pipe would not run within a long C call.)
    """
    pipe = multiprocessing.parent_process().sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def call(function: RewardFunction, samples: list[Sample]) -> CallResult:
    """Outcomes of the samples of one task, in their order."""
    started = time.perf_counter()
    if function.batch:
        outcomes = _call_batch(function, samples)
    else:
        outcomes = [_call_one(function, sample) for sample in samples]
    return CallResult(outcomes, time.perf_counter() - started)


def _call_one(function: RewardFunction, sample: Sample) -> Outcome:
    try:
        return outcome_of(function.call(sample), sample)
    except (Exception, SystemExit) as error:
        return failure_of(error)


def _call_batch(function: RewardFunction, samples: list[Sample]) -> list[Outcome]:
    try:
        return outcomes_of(function.call(samples), samples)
    except (Exception, SystemExit) as error:
        return [failure_of(error)] * len(samples)


def failure_of(error: BaseException) -> Failure:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Failure(FailureKind.RAISED, f"the function raised {type(error).__name__}: {error}{at}")


def late(timeout_s: float) -> Failure:
    return Failure(FailureKind.TIMED_OUT, f"the function was not done after reward.timeout_s={timeout_s:g} seconds")


def outcomes_of(returned: Any, samples: list[Sample]) -> list[Outcome]:
    """Of what a function of a whole group returned."""
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, dict)):
        wrong = f"a {type(returned).__name__}; return a list of {len(samples)} rewards, one per sample"
        return [_refused(wrong)] * len(samples)
    values = list(returned)
    if len(values) != len(samples):
        return [_refused(f"{len(values)} rewards for {len(samples)} samples")] * len(samples)
    return [outcome_of(value, sample) for value, sample in zip(values, samples, strict=True)]


def outcome_of(value: Any, sample: Sample) -> Outcome:
    """A Reward of plain numbers from what a function returned for one sample.

    Taken are numbers of Python, numpy and torch, Reward, and dictionaries as verl's reward functions return them:
    `score`, and optionally `acc`; further numbers become named parts, anything else in it is left out.
    """
    try:
        reward = _reward_in(value)
        return Reward(
            score=_finite(reward.score, "score"),
            accuracy=None if reward.accuracy is None else _finite(reward.accuracy, "accuracy"),
            token_rewards=None if reward.token_rewards is None else _token_rewards(reward.token_rewards, sample),
            parts={name: _finite(part, name) for name, part in reward.parts.items()},
        )
    except _NoRewardError as error:
        return error.failure


class _NoRewardError(Exception):
    """A value of which no Reward can be made."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


def _refused(what: str) -> Failure:
    return Failure(FailureKind.REFUSED, f"the function returned {what}")


def _reward_in(value: Any) -> Reward:
    if isinstance(value, Reward):
        return value
    if not isinstance(value, dict):
        return Reward(value)
    if "score" not in value:
        raise _NoRewardError(
            _refused(f"a dictionary without 'score'; it has {', '.join(map(str, value)) or 'nothing'}")
        )
    parts = {name: part for name, part in value.items() if name not in ("score", "acc") and _is_number(part)}
    return Reward(value["score"], value.get("acc"), parts=parts)


def _finite(value: Any, name: str) -> float:
    if value is None:
        raise _NoRewardError(Failure(FailureKind.NO_SCORE, f"the function returned None as {name}"))
    if not _is_number(value):
        accepted = "a number, a dictionary with a number 'score', or a mppo.rollout.rewards.Reward"
        raise _NoRewardError(_refused(f"{value!r:.200} as {name}; return {accepted}"))
    number = float(value)
    if not math.isfinite(number):
        message = f"the function returned {number} as {name}; a finite number is needed"
        raise _NoRewardError(Failure(FailureKind.NO_SCORE, message))
    return number


def _token_rewards(values: Any, sample: Sample) -> list[float]:
    given, wanted = len(values), len(sample.token_ids)
    if given != wanted:
        raise _NoRewardError(_refused(f"{given} token_rewards; {wanted} are needed, one per token of the trajectory"))
    return [_finite(value, "token_rewards") for value in values]


def _is_number(value: Any) -> bool:
    """Numbers of Python, and scalars of numpy and torch, which have an empty shape and know their type of number."""
    return isinstance(value, Real) or (getattr(value, "shape", None) == () and isinstance(value.item(), Real))
