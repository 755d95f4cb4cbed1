"""Estimators that compare the answers to one prompt."""

from dataclasses import replace
from math import sqrt
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given

from mppo.algorithm.advantages import estimator
from mppo.algorithm.advantages.groups import groups_of_one, two_largest
from mppo.errors import ConfigError
from tests.unit.advantage_cases import advantage_batches, estimate, outcomes

pytestmark = pytest.mark.unit

ALONE = 5 / (1 + 1e-6)
"""A score of 5 in a group of one: mean 0, deviation 1."""
BY_HAND = {
    "grpo": [-2 / sqrt(7), -1 / sqrt(7), 3 / sqrt(7), -2 / sqrt(8), 2 / sqrt(8), ALONE],
    "grpo_passk": [0, 0, 4 / sqrt(7), 0, 4 / sqrt(8), ALONE],
    "rloo": [-3, -1.5, 4.5, -4, 4, 5],
    "opo": [-2, -1, 3, -2, 2, 5],
    "gpg": [-2.4, -1.2, 3.6, -2.4, 2.4, 6],  # one score of six is 0, so alpha is 6 / 5
}
"""For the scores 1, 2, 6 of one group (mean 3, variance 7), 0, 4 of another (mean 2, variance 8), and 5 on its own."""


def whitened(x):
    return [(value - mean(x)) / stdev(x) for value in x]


BY_HAND["reinforce_plus_plus_baseline"] = whitened([-2, -1, 3, -2, 2, 5])
BY_HAND["gdpo"] = whitened(BY_HAND["grpo"])


def estimate_outcomes(name, scores, groups, **others):
    """`gdpo` reads the same scores as a part of the reward."""
    x = outcomes(scores, groups, reward_parts={"right": torch.tensor(scores)}, **others)
    return estimate(name, x, **({"gdpo_reward_keys": ["right"]} if name == "gdpo" else {}))


@pytest.mark.parametrize("name", BY_HAND)
def test_groups_of_three_two_and_one(name):
    result = estimate_outcomes(name, [1.0, 2.0, 6.0, 0.0, 4.0, 5.0], [0, 0, 0, 1, 1, 2])
    assert result.advantages.tolist() == pytest.approx(BY_HAND[name], rel=1e-5)
    assert torch.equal(result.returns, result.advantages)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_rejected_trajectory_does_not_move_its_group(name):
    """A score of 100 in the first group, and the only answer of a fourth group."""
    scores, groups = [100.0, 1.0, 2.0, 6.0, 0.0, 4.0, 5.0, 7.0], [0, 0, 0, 0, 1, 1, 2, 3]
    kept = [False, True, True, True, True, True, True, False]
    result = estimate_outcomes(name, scores, groups, kept=kept)
    assert result.advantages.tolist() == pytest.approx([0, *BY_HAND[name], 0], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "gpg"])
def test_rejecting_the_action_that_bears_the_reward_does_not_erase_it(name):
    """Two actions each; the last, which is rewarded, is rejected in every other trajectory."""
    kept = [True, False, True, True, True, False, True, True, True, False, True, True]
    result = estimate_outcomes(name, [1.0, 2.0, 6.0, 0.0, 4.0, 5.0], [0, 0, 0, 1, 1, 2], lengths=[2] * 6, kept=kept)
    expected = torch.tensor(BY_HAND[name]).repeat_interleave(2) * torch.tensor(kept)
    assert result.advantages.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", BY_HAND)
def test_without_any_trajectory_that_trains_all_is_zero(name):
    result = estimate_outcomes(name, [1.0, 2.0, 6.0], [0, 0, 1], kept=[False] * 3)
    assert result.advantages.tolist() == [0.0] * 3


def reference(name, scores, lengths, alpha):
    """The advantage of each answer of one group, and its own score where it has no other to compare with."""
    count, alone = len(scores), len(scores) == 1
    centre, deviation = (0.0, 1.0) if alone else (mean(scores), stdev(scores))
    best = scores.index(max(scores))
    second = 0.0 if alone else sorted(scores)[-2]
    weighted = 0.0 if alone else sum(n * s for n, s in zip(lengths, scores, strict=True)) / sum(lengths)
    return {
        "grpo": [(s - centre) / (deviation + 1e-6) for s in scores],
        "grpo_passk": [(s - second) / (deviation + 1e-6) if i == best else 0.0 for i, s in enumerate(scores)],
        "rloo": [s - (0.0 if alone else (sum(scores) - s) / (count - 1)) for s in scores],
        "opo": [s - weighted for s in scores],
        "gpg": [alpha * (s - centre) / 2.0 for s in scores],
    }[name]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
@given(advantage_batches())
def test_scores_are_compared_within_each_group_of_the_batch(name, drawn):
    batch, x = drawn
    scores = [row.sum().item() for row in x.rewards.split(batch.lengths)]
    lengths = [int(row.sum()) for row in x.loss_mask.split(batch.lengths)]
    trains = [i for i, n in enumerate(lengths) if n]
    alpha = len(trains) / max(sum(scores[i] != 0 for i in trains), 1)
    expected = [0.0] * len(scores)
    for group in range(x.num_groups):
        members = [i for i in trains if x.groups[i] == group]
        if members:
            of_group = reference(name, [scores[i] for i in members], [lengths[i] for i in members], alpha)
            expected = [of_group[members.index(i)] if i in members else e for i, e in enumerate(expected)]

    advantages = estimate(name, x, **({"f_norm": 2.0} if name == "gpg" else {})).advantages
    tokens = [e for e, n in zip(expected, batch.lengths, strict=True) for _ in range(n)]
    assert advantages.tolist() == pytest.approx((torch.tensor(tokens) * x.loss_mask).tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("grpo", [-2, -1, 3, -2, 2, 5]), ("grpo_passk", [0, 0, 4, 0, 4, 5])])
def test_by_choice_the_deviation_does_not_divide(name, expected):
    x = outcomes([1.0, 2.0, 6.0, 0.0, 4.0, 5.0], [0, 0, 0, 1, 1, 2])
    assert estimate(name, x, norm_adv_by_std_in_grpo=False).advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_a_group_of_equals_has_no_advantage(name):
    assert estimate(name, outcomes([0.1] * 3, [0] * 3)).advantages.tolist() == pytest.approx([0] * 3, abs=1e-9)


def test_of_the_best_answers_the_first_in_the_batch_is_meant():
    """It is not ahead of its equal; the trajectories come in another order here than in the batch."""
    x = replace(outcomes([3.0, 1.0, 3.0, 3.0], [0] * 4), indices=torch.tensor([2, 3, 1, 0]))
    leaders = two_largest(x, x.scores)
    assert (leaders.index.tolist(), leaders.largest.tolist(), leaders.second.tolist()) == ([0], [3.0], [3.0])
    assert estimate("grpo_passk", x).advantages.tolist() == [0.0] * 4


def test_the_two_largest_leave_out_what_does_not_train():
    x = outcomes([9.0, 2.0, 4.0, -1.0], [0, 0, 0, 2], kept=[False, True, True, True])
    leaders = two_largest(x, x.scores)
    assert leaders.index.tolist() == [2, -1, 3]
    assert leaders.largest[[0, 2]].tolist() == [4.0, -1.0]
    assert leaders.second.tolist() == [2.0, 0.0, 0.0]


def test_groups_that_are_left_with_one_answer_are_counted():
    x = outcomes([1.0] * 6, [0, 0, 1, 2, 2, 4], kept=[True, False, True, True, True, False])
    assert groups_of_one(x) == 2


def test_opo_weighs_the_mean_by_length():
    """Scores 1, 2, 6 of lengths 1, 2, 3: the mean is (1 + 4 + 18) / 6."""
    result = estimate("opo", outcomes([1.0, 2.0, 6.0], [0] * 3, lengths=[1, 2, 3])).advantages
    assert result.tolist() == pytest.approx([1 - 23 / 6] + [2 - 23 / 6] * 2 + [6 - 23 / 6] * 3)


@pytest.mark.parametrize(
    ("scores", "f_norm", "alpha"), [([1.0, 0.0, 0.0, 3.0], 1.0, 2.0), ([1.0, 0.0, 0.0, 3.0], 4.0, 0.5)]
)
def test_gpg_makes_up_for_scores_of_zero(scores, f_norm, alpha):
    result = estimate("gpg", outcomes(scores, [0] * 4), f_norm=f_norm).advantages
    assert result.tolist() == pytest.approx([0.0, -alpha, -alpha, 2 * alpha])


def test_gpg_where_every_score_is_zero_has_no_advantage():
    assert estimate("gpg", outcomes([0.0] * 3, [0, 0, 1])).advantages.tolist() == [0.0] * 3


def test_the_score_is_the_sum_of_all_rewards_of_a_trajectory():
    x = replace(outcomes([1.0, 2.0], [0, 0], lengths=[3, 1]), rewards=torch.tensor([4.0, -1.0, 2.0, 3.0]))
    assert x.scores.tolist() == [5.0, 3.0]


def test_gdpo_normalises_each_part_before_it_adds_them():
    """A part of twice the scale counts as much as the other, unless it weighs less."""
    parts = {"right": torch.tensor([0.0, 1.0, 0.0, 1.0]), "brief": torch.tensor([2000.0, 0.0, 0.0, 2000.0])}
    x = outcomes([0.0] * 4, [0] * 4, reward_parts=parts)
    equal = estimate("gdpo", x, gdpo_reward_keys=["right", "brief"]).advantages
    assert equal.tolist() == pytest.approx(whitened([0.0, 0.0, -1.0, 1.0]), rel=1e-5, abs=1e-5)
    less = estimate("gdpo", x, gdpo_reward_keys=["right", "brief"], gdpo_reward_weights=[1.0, 0.5]).advantages
    assert less.tolist() == pytest.approx(whitened([-0.5, 0.5, -1.5, 1.5]), rel=1e-5, abs=1e-5)


def test_gdpo_may_only_centre_its_parts():
    parts = {"right": torch.tensor([0.0, 1.0, 5.0]), "brief": torch.tensor([1.0, 0.0, 2.0])}
    x = outcomes([0.0] * 3, [0] * 3, reward_parts=parts)
    knobs = {"gdpo_reward_keys": ["right", "brief"], "norm_adv_by_std_in_grpo": False}
    assert estimate("gdpo", x, **knobs).advantages.tolist() == pytest.approx(whitened([-2.0, -2.0, 4.0]))


def test_gdpo_says_which_parts_of_the_reward_it_needs():
    assert estimator("gdpo", {"gdpo_reward_keys": ["right", "brief"]}).reward_keys == ("right", "brief")
    assert estimator("grpo").reward_keys == ()


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("gdpo", {}, r"adv_options\.gdpo_reward_keys is empty"),
        (
            "gdpo",
            {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0]},
            r"adv_options\.gdpo_reward_weights has 1 numbers for 2 keys",
        ),
        ("gdpo", {"gdpo_reward_keys": ["a", "b", "a"]}, r"adv_options\.gdpo_reward_keys names a part twice: a, b, a"),
        ("gpg", {"f_norm": 0.0}, r"adv_options\.f_norm is 0\.0"),
    ],
)
def test_a_knob_that_cannot_be_is_named(name, knobs, message):
    with pytest.raises(ConfigError, match=message):
        estimator(name, knobs, "algorithm.adv_options")
