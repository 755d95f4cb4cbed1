"""Rewards by name: plain callables from a sample to a number."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from mppo.batch.trajectory import Trajectory
from mppo.errors import ConfigError, RewardError
from mppo.registry import Registry
from mppo.rollout.prompts import Prompt


@dataclass(frozen=True)
class Sample:
    """What a reward function sees."""

    prompt: str
    response: str
    ground_truth: Any
    fields: dict[str, Any]
    """The row that the prompt came from."""
    trajectory: Trajectory


@dataclass(frozen=True)
class Reward:
    """What it may return instead of a number."""

    score: float
    accuracy: float | None = None
    """What validation reports; None: the score."""
    token_rewards: list[float] | None = None
    """One for each token of the trajectory, in addition to the score at the last action."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts, reported as metrics."""


RewardFunction = Callable[..., float | Reward]
REWARDS: Registry[RewardFunction] = Registry("reward")


@dataclass(frozen=True)
class ExactMatchConfig:
    first_line: bool = False
    """Compare only the first line of the answer."""
    ignore_case: bool = False


@REWARDS.register("exact_match", config=ExactMatchConfig)
def exact_match(sample: Sample, config: ExactMatchConfig) -> float:
    """1 when the answer, stripped, is the ground truth."""
    given, wanted = sample.response.strip(), str(sample.ground_truth).strip()
    if config.first_line:
        given = given.partition("\n")[0].strip()
    if config.ignore_case:
        given, wanted = given.lower(), wanted.lower()
    return float(given == wanted)


@REWARDS.register("math_verify")
def math_verify(sample: Sample) -> float:
    """1 when math-verify finds the answer mathematically equal to the ground truth."""
    from math_verify import parse, verify

    wanted = parse(f"${sample.ground_truth}$", parsing_timeout=None)
    return float(verify(wanted, parse(sample.response, parsing_timeout=None), timeout_seconds=None))


@REWARDS.register("reasoning_gym")
def reasoning_gym(sample: Sample) -> float:
    """The score of reasoning-gym's own scorer for the data set that the entry came from."""
    from reasoning_gym import get_score_answer_fn

    entry = sample.ground_truth
    return float(get_score_answer_fn(entry["metadata"]["source_dataset"])(sample.response.strip(), entry))


@REWARDS.register("class")
def character_class(sample: Sample) -> float:
    """Share of characters of the class asked for."""
    belongs = str.isdigit if sample.ground_truth == "d" else str.isalpha
    return sum(belongs(c) for c in sample.response) / max(sample.trajectory.actions, 1)


@REWARDS.register("offset")
def offset(sample: Sample) -> Reward:
    """Share of digits copied right, plus a third of the prompt's shift; accurate when all are right."""
    wanted = sample.ground_truth
    right = sum(sample.response[i : i + 1] == digit for i, digit in enumerate(wanted)) / len(wanted)
    return Reward(right + sample.fields["shift"] / 3, accuracy=float(sample.response == wanted))


def score(
    function: RewardFunction, trajectories: list[Trajectory], prompts: dict[int, Prompt], tokenizer: Any
) -> list[float]:
    """Give every trajectory its reward, in place; returns their accuracies. `prompts` are by group.

    Raises RewardError that names the sample when the function raises or returns what is not a finite number.
    """
    accuracies = []
    for trajectory in trajectories:
        prompt = prompts[trajectory.group]
        response = tokenizer.decode(trajectory.tokens[len(prompt.ids) :], skip_special_tokens=True)
        sample = Sample(prompt.text, response, prompt.ground_truth, prompt.fields, trajectory)
        reward = _checked(function, sample)
        trajectory.reward = float(reward.score)
        trajectory.parts = {name: float(value) for name, value in reward.parts.items()}
        if reward.token_rewards is not None:
            trajectory.token_rewards = torch.tensor(reward.token_rewards, dtype=torch.float32)
        trajectory.accuracy = float(reward.score if reward.accuracy is None else reward.accuracy)
        accuracies.append(trajectory.accuracy)
    return accuracies


def check_parts(trajectories: list[Trajectory], keys: tuple[str, ...]) -> None:
    """Raise RewardError for a trajectory without one of the named parts of the reward that the estimator reads."""
    for trajectory in trajectories:
        for key in keys:
            if key not in trajectory.parts:
                reported = ", ".join(sorted(trajectory.parts)) or "none"
                raise RewardError(
                    f"trajectory {trajectory.index}: the reward function reported no part {key!r}, which"
                    f" algorithm.adv_options names; it reported {reported}"
                )


def _checked(function: RewardFunction, sample: Sample) -> Reward:
    where = (
        f"reward of trajectory {sample.trajectory.index}, prompt {sample.prompt[-200:]!r},"
        f" answer {sample.response[:200]!r}"
    )
    try:
        result = function(sample)
    except ConfigError:
        raise
    except Exception as error:
        raise RewardError(f"{where}: the function raised {type(error).__name__}: {error}") from error
    reward = result if isinstance(result, Reward) else Reward(result)
    named = {"score": reward.score, **reward.parts}
    if reward.accuracy is not None:
        named["accuracy"] = reward.accuracy
    for name, value in named.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"{where}: the function returned {value!r} as {name}; a finite number is needed")
    if reward.token_rewards is not None:
        given, wanted = len(reward.token_rewards), len(sample.trajectory)
        if given != wanted or not all(math.isfinite(x) for x in reward.token_rewards):
            raise RewardError(f"{where}: token_rewards must be {wanted} finite numbers, one per token; got {given}")
    return reward
