"""Rewards: right on examples; what a function may return, and what is said of anything else."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from mppo.errors import ConfigError
from mppo.rollout.reward_calls import Failure, FailureKind, call, outcome_of
from mppo.rollout.rewards import Reward, RewardFunction, Sample
from mppo.rollout.tasks import REWARDS, general_rewards, reasoning_gym, reward_function

pytestmark = pytest.mark.unit


def answered(response, ground_truth=None, prompt="q=", **fields) -> Sample:
    length = len(prompt) + len(response)
    mask = tuple(i >= len(prompt) for i in range(length))
    return Sample(prompt, response, ground_truth, fields, tuple(range(length)), mask)


def outcome(name, sample, **options):
    (outcome,) = call(reward_function(name, options), [sample]).outcomes
    return outcome


@pytest.mark.parametrize(("response", "reward"), [(" 12 ", 1.0), ("12 3", 0.0), ("1", 0.0)])
def test_exact_match(response, reward):
    assert outcome("exact_match", answered(response, "12")).score == reward


def test_exact_match_of_the_first_line_and_of_any_case():
    assert outcome("exact_match", answered("a\n13", "A"), first_line=True, ignore_case=True).score == 1.0
    assert outcome("exact_match", answered("a\n13", "a")).score == 0.0


@pytest.mark.parametrize(("response", "reward"), [("1/2", 1.0), ("0.5", 1.0), ("1/3", 0.0)])
def test_math_verify(response, reward):
    assert outcome("math_verify", answered(response, "0.5")).score == reward


THOUGHTS = [
    ("q=", "<think>0.5 \\boxed{0.5}</think>1/3", 0.0),
    ("q=", "<think>1/3 \\boxed{1/3}</think>the answer is \\boxed{1/2}", 1.0),
    ("q=", "<think>\\boxed{0.5}", 0.0),
    ("q=<think>\n", "\\boxed{0.5}", 0.0),
    ("q=<think>\n", "\\boxed{0.3}</think>\\boxed{0.5}", 1.0),
    ("q=<think>\n\n</think>\n", "\\boxed{0.5}", 1.0),
]


@pytest.mark.parametrize(("prompt", "response", "reward"), THOUGHTS)
def test_what_is_thought_is_no_answer(prompt, response, reward):
    assert outcome("math_verify", answered(response, "0.5", prompt)).score == reward
    exact = response.replace("the answer is ", "").replace("\\boxed{1/2}", "0.5").replace("\\boxed{0.5}", "0.5")
    assert outcome("exact_match", answered(exact, "0.5", prompt)).score == reward


def test_reasoning_gyms_own_scorer():
    pytest.importorskip("reasoning_gym")
    config = reasoning_gym.ReasoningGymConfig(dataset="chain_sum", size=1)
    entry = reasoning_gym.reasoning_gym_prompts(config)[0]["ground_truth"]
    assert outcome("reasoning_gym", answered(entry["answer"], entry)).score == 1.0
    assert outcome("reasoning_gym", answered("x", entry)).score < 1.0


def test_the_class_reward_counts_characters_of_the_class_among_the_models_tokens():
    assert outcome("class", answered("12ab", "d")).score == 0.5
    unfinished = Sample("l:", "a<eos>1", "l", {}, tuple(range(5)), (False, False, True, True, True))
    assert outcome("class", unfinished).score == pytest.approx(1 / 3)  # the letters of a special token are none
    stopped = Sample("d:", "12", "d", {}, tuple(range(5)), (False, False, True, True, True))
    assert outcome("class", stopped).score == pytest.approx(2 / 3)  # the end of the text is an action without a letter


def test_offset_shifts_the_reward_and_not_the_accuracy():
    reward = outcome("offset", answered("129", "123", shift=6))
    assert reward.score == pytest.approx(2 / 3 + 2)
    assert reward.accuracy == 0.0


FOUR = answered("ab")
"""A sample of four tokens."""


@pytest.mark.parametrize(
    "returned",
    [
        1,
        True,
        1.0,
        Fraction(1),
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.array(1.0),
        torch.tensor(1.0),
        Reward(1),
    ],
    ids=repr,
)
def test_numbers_of_any_library_are_taken(returned):
    reward = outcome_of(returned, FOUR)
    assert reward == Reward(1.0) and type(reward.score) is float


def test_dictionaries_as_verls_functions_return_them():
    returned = {"score": np.float64(0.5), "acc": True, "format": torch.tensor(2), "pred": "12", "note": None}
    assert outcome_of(returned, FOUR) == Reward(0.5, accuracy=1.0, parts={"format": 2.0})


def test_a_reward_may_have_token_rewards_and_parts():
    returned = Reward(1, token_rewards=[0.0, 0.0, np.float32(0.5), 0.25], parts={"length": 2})
    assert outcome_of(returned, FOUR) == Reward(1.0, token_rewards=[0.0, 0.0, 0.5, 0.25], parts={"length": 2.0})


@pytest.mark.parametrize(
    ("returned", "kind", "said"),
    [
        (None, "no score", "returned None"),
        (math.nan, "no score", "returned nan as score; a finite number"),
        (Reward(1.0, parts={"short": math.inf}), "no score", "returned inf as short"),
        ({"score": None}, "no score", "returned None as score"),
        ("1", "refused", "returned '1' as score; return a number, a dictionary .* mppo.rollout.rewards.Reward"),
        ([1.0], "refused", r"returned \[1.0\] as score"),
        (np.ones(2), "refused", "as score; return a number"),
        ({"reward": 1.0}, "refused", "a dictionary without 'score'; it has reward"),
        (Reward(1.0, parts={"short": "x"}), "refused", "'x' as short"),
        (Reward(1.0, token_rewards=[1.0]), "refused", "1 token_rewards; 4 are needed, one per token"),
    ],
    ids=repr,
)
def test_anything_else_is_a_failure_that_says_what_to_return(returned, kind, said):
    failure = outcome_of(returned, FOUR)
    assert isinstance(failure, Failure) and failure.kind == kind
    assert re.search(said, failure.message)


def test_what_a_function_raises_is_named_with_its_line():
    (failure,) = call(RewardFunction("mine", lambda sample: 1 / 0), [FOUR]).outcomes
    assert failure.kind == FailureKind.RAISED
    assert "ZeroDivisionError: division by zero (test_rewards.py:" in failure.message


@pytest.mark.parametrize(
    ("returned", "said"), [([1.0], "1 rewards for 2 samples"), (1.0, "a float; return a list of 2 rewards")]
)
def test_a_function_of_a_group_returns_a_reward_for_each_sample(returned, said):
    function = RewardFunction("mine", lambda samples: returned, batch=True)
    outcomes = call(function, [FOUR, FOUR]).outcomes
    assert [o.kind for o in outcomes] == ["refused", "refused"] and said in outcomes[0].message


def test_functions_of_a_group_and_async_ones_are_known_by_what_they_declare():
    @REWARDS.register("all at once", batch=True, override=True)
    async def judge(samples):
        return [0.0] * len(samples)

    function = reward_function("all at once", {})
    assert function.batch and function.is_async
    assert not reward_function("exact_match", {"ignore_case": True}).is_async
    assert reward_function("tests.unit.reward_functions:group_mean", {}).batch


def test_a_missing_package_is_named():
    REWARDS.register("needy", packages=("no_such_package",), override=True)(general_rewards.exact_match)
    with pytest.raises(ConfigError, match=r"reward\.function=needy needs the package no-such-package"):
        reward_function("needy", {})
