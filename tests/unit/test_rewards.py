"""Rewards: right on examples, and named with their sample when they fail."""

import math

import pytest
import torch

from mppo.batch.trajectory import Trajectory
from mppo.errors import RewardError
from mppo.rollout.generators import ReasoningGymConfig, reasoning_gym
from mppo.rollout.prompts import Prompt
from mppo.rollout.rewards import REWARDS, Reward, score
from mppo.weights.presets import PRESETS

pytestmark = pytest.mark.unit

TOKENIZER = PRESETS.get("char").fn({})[1]


def answered(prompt: str, response: str, index: int = 0) -> Trajectory:
    ids = torch.tensor(TOKENIZER(prompt + response)["input_ids"])
    return Trajectory(index, 0, ids, torch.arange(len(ids)) >= len(prompt), torch.zeros(len(ids)))


def rewarded(function, response, ground_truth, prompt="q=", **fields):
    trajectory = answered(prompt, response, index=5)
    prompts = {0: Prompt(prompt, tuple(TOKENIZER(prompt)["input_ids"]), ground_truth, fields)}
    accuracies = score(function, [trajectory], prompts, TOKENIZER)
    return trajectory, accuracies[0]


@pytest.mark.parametrize(
    ("options", "response", "reward"),
    [({}, " 12 ", 1.0), ({}, "12 3", 0.0), ({}, "1", 0.0)],
)
def test_exact_match(options, response, reward):
    function = REWARDS.get("exact_match").bind(options, "reward.options")
    assert rewarded(function, response, "12")[0].reward == reward


def test_exact_match_of_the_first_line_only():
    from mppo.rollout.rewards import ExactMatchConfig, Sample, exact_match

    sample = Sample("q=", "12\n13", "12", {}, answered("q=", "12"))
    assert exact_match(sample, ExactMatchConfig(first_line=True)) == 1.0
    assert exact_match(sample, ExactMatchConfig()) == 0.0


@pytest.mark.parametrize(("response", "reward"), [("1/2", 1.0), ("0.5", 1.0), ("1/3", 0.0)])
def test_math_verify(response, reward):
    assert rewarded(REWARDS.get("math_verify").fn, response, "0.5")[0].reward == reward


def test_reasoning_gyms_own_scorer():
    entry = reasoning_gym(ReasoningGymConfig(dataset="chain_sum", size=1))[0]["ground_truth"]
    function = REWARDS.get("reasoning_gym").fn
    assert rewarded(function, entry["answer"], entry)[0].reward == 1.0
    assert rewarded(function, "x", entry)[0].reward < 1.0


def test_offset_shifts_the_reward_and_not_the_accuracy():
    trajectory, accuracy = rewarded(REWARDS.get("offset").fn, "129", "123", shift=6)
    assert trajectory.reward == pytest.approx(2 / 3 + 2)
    assert accuracy == 0.0


def test_a_reward_may_have_token_rewards_and_parts():
    function = lambda sample: Reward(1.0, token_rewards=[0.0, 0.0, 0.5, 0.25], parts={"length": 2})  # noqa: E731
    trajectory, _ = rewarded(function, "ab", "ab")
    assert trajectory.token_rewards.tolist() == [0.0, 0.0, 0.5, 0.25]
    assert trajectory.parts == {"length": 2.0}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda sample: 1 / 0, "ZeroDivisionError"),
        (lambda sample: math.nan, "returned nan"),
        (lambda sample: None, "returned None"),
        (lambda sample: Reward(1.0, token_rewards=[1.0]), "one per token"),
    ],
)
def test_a_failing_reward_names_the_sample(function, said):
    with pytest.raises(RewardError) as caught:
        rewarded(function, "42", "12")
    assert "trajectory 5" in str(caught.value) and "'42'" in str(caught.value) and said in str(caught.value)
