"""Estimators over tokens, and what holds for every estimator."""

import math
from dataclasses import replace
from statistics import mean, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.advantages import ESTIMATORS, Advantages, Estimator, estimator
from mppo.algorithm.advantages.tokens import discounted_suffix_sum, rewards_to_go, segment_cumsum, whiten
from mppo.algorithm.reduction import WHOLE
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from mppo.errors import ConfigError, DataError
from tests.unit.advantage_cases import advantage_batches, estimate, outcomes, part_of
from tests.unit.samples import assignments, held_by, normals, packed_batches, vectors

pytestmark = pytest.mark.unit

DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
WHITENED = ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"]
OF_RETURNS = ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"]


def rows_of(batch, *fields):
    """The trajectories as lists, one list for each of the fields."""
    return zip(*([row.tolist() for row in field.split(batch.lengths)] for field in fields), strict=True)


def whitened(x, mask):
    """By the definition, of a list."""
    kept = [value for value, keep in zip(x, mask, strict=True) if keep]
    if len(kept) < 2:
        return [0.0] * len(x)
    centre, scale = mean(kept), (variance(kept) + 1e-8) ** 0.5
    return [(value - centre) / scale if keep else 0.0 for value, keep in zip(x, mask, strict=True)]


def recursion(rewards, values, mask, gamma, lam):
    """GAE of one trajectory, backwards; a masked position hands on what came from behind it."""
    next_value, advantage, result = 0.0, 0.0, [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            result[t] = advantage = delta + gamma * lam * advantage
            next_value = values[t]
    return result


@given(advantage_batches(max_length=12), DISCOUNTS, st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_is_the_recursion_over_the_actions_of_each_trajectory(drawn, gamma, lam):
    batch, x = drawn
    raw = [a for row in rows_of(batch, x.rewards, x.values, x.action_mask) for a in recursion(*row, gamma, lam)]
    result = estimate("gae", x, gamma=gamma, lam=lam)
    returns = torch.tensor(raw, dtype=torch.double) + torch.where(x.action_mask, x.values, 0.0)
    torch.testing.assert_close(result.returns, returns)
    assert result.advantages.tolist() == pytest.approx(whitened(raw, x.loss_mask.tolist()), rel=1e-6, abs=1e-6)


def discounted(rewards, mask, gamma):
    to_go, result = 0.0, [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            result[t] = to_go = rewards[t] + gamma * to_go
    return result


@given(advantage_batches(), DISCOUNTS)
def test_reinforce_plus_plus_whitens_discounted_rewards_to_go(drawn, gamma):
    batch, x = drawn
    returns = [value for row in rows_of(batch, x.rewards, x.action_mask) for value in discounted(*row, gamma)]
    result = estimate("reinforce_plus_plus", x, gamma=gamma)
    assert result.returns.tolist() == pytest.approx(returns)
    assert result.advantages.tolist() == pytest.approx(whitened(returns, x.loss_mask.tolist()), rel=1e-6, abs=1e-6)


@given(advantage_batches())
def test_remax_takes_the_reward_of_the_greedy_answer_from_the_rewards_to_go(drawn):
    batch, x = drawn
    returns = [value for row in rows_of(batch, x.rewards, x.action_mask) for value in discounted(*row, 1.0)]
    greedy = [b for b, length in zip(x.reward_baselines.tolist(), batch.lengths, strict=True) for _ in range(length)]
    result = estimate("remax", x)
    assert result.returns.tolist() == pytest.approx(returns)
    expected = [(r - b) * k for r, b, k in zip(returns, greedy, x.loss_mask.tolist(), strict=True)]
    assert result.advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ESTIMATORS.names())
@settings(max_examples=10)
@given(advantage_batches(), st.data())
def test_parts_of_a_batch_agree_with_the_whole(name, drawn, data):
    """Data-parallel ranks hold unequal parts, groups are spread over them, one may hold nothing."""
    batch, x = drawn
    held = held_by(data.draw(assignments(len(batch.lengths))))
    pieces = [batch.select(rows) for rows in held]
    whole = estimate(name, x)
    parts = on_simulated_ranks(pieces, lambda piece, reduction: estimate(name, part_of(x, piece, reduction)))
    for field in ("advantages", "returns"):
        together = batch.gather_back([p.origin for p in pieces], [getattr(part, field) for part in parts])
        torch.testing.assert_close(together, getattr(whole, field), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS.names())
@settings(max_examples=10)
@given(advantage_batches(), st.data())
def test_trajectories_may_come_in_any_order(name, drawn, data):
    batch, x = drawn
    shuffled = batch.select(data.draw(st.permutations(range(len(batch.lengths)))))
    result = estimate(name, part_of(x, shuffled))
    back = batch.gather_back([shuffled.origin], [result.advantages])
    torch.testing.assert_close(back, estimate(name, x).advantages, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS.names())
@settings(max_examples=10)
@given(advantage_batches())
def test_only_actions_that_train_have_an_advantage(name, drawn):
    _, x = drawn
    advantages = estimate(name, x).advantages
    assert (advantages[~x.loss_mask] == 0).all()
    assert advantages.dtype == x.rewards.dtype


@pytest.mark.parametrize("name", ESTIMATORS.names())
@settings(max_examples=10)
@given(advantage_batches())
def test_a_trajectory_that_is_rejected_whole_moves_no_other(name, drawn):
    """The batch with it, and the batch without it."""
    batch, x = drawn
    last = x.segments.ids == len(batch.lengths) - 1
    x = replace(x, loss_mask=x.loss_mask & ~last, rewards=torch.where(last & x.action_mask, 100.0, x.rewards))
    others = batch.select(range(len(batch.lengths) - 1))
    without = replace(part_of(x, others), num_trajectories=len(others.lengths))
    expected = estimate(name, without).advantages
    torch.testing.assert_close(estimate(name, x).advantages[others.origin], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OF_RETURNS)
@given(advantage_batches())
def test_rejection_changes_no_return(name, drawn):
    """A reward at a rejected action still counts for the actions before it."""
    _, x = drawn
    assert torch.equal(estimate(name, x).returns, estimate(name, replace(x, loss_mask=x.action_mask)).returns)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
@given(advantage_batches(), st.sampled_from([1e6, math.nan]))
def test_estimators_of_returns_do_not_read_what_the_mask_hides(name, drawn, garbage):
    _, shown = drawn
    fields = {f: torch.where(shown.action_mask, getattr(shown, f), garbage) for f in ("rewards", "values")}
    here, there = estimate(name, shown), estimate(name, replace(shown, **fields))
    assert torch.equal(here.advantages, there.advantages)
    assert torch.equal(here.returns, there.returns)


@pytest.mark.parametrize("name", WHITENED)
@given(advantage_batches())
def test_whitened_advantages_have_mean_0_and_variance_1_over_what_trains(name, drawn):
    _, x = drawn
    kept = estimate(name, x).advantages[x.loss_mask].tolist()
    assert sum(kept) == pytest.approx(0, abs=1e-9)
    if len(kept) > 1 and max(kept) - min(kept) > 0.1:
        assert variance(kept) == pytest.approx(1, rel=1e-3)


@given(st.lists(st.integers(0, 3), max_size=20).map(sorted), DISCOUNTS, st.data())
def test_the_suffix_sum_is_the_loop(ids, discount, data):
    x = data.draw(vectors(len(ids)))
    expected = x.tolist()
    for t in reversed(range(len(ids) - 1)):
        expected[t] += discount * expected[t + 1] * (ids[t] == ids[t + 1])
    summed = discounted_suffix_sum(x, torch.tensor(ids, dtype=torch.long), discount)
    assert summed.tolist() == pytest.approx(expected)


@given(st.lists(st.integers(0, 3), max_size=20).map(sorted), st.data())
def test_the_running_sum_is_the_loop(ids, data):
    x = data.draw(vectors(len(ids)))
    expected = x.tolist()
    for t in range(1, len(ids)):
        expected[t] += expected[t - 1] * (ids[t] == ids[t - 1])
    assert segment_cumsum(x, torch.tensor(ids, dtype=torch.long)).tolist() == pytest.approx(expected)


def test_rewards_to_go_step_over_what_is_no_action():
    rewards, mask = torch.tensor([1.0, 50.0, 4.0, 7.0, 2.0]), torch.tensor([True, False, True, False, True])
    to_go = rewards_to_go(rewards, mask, torch.tensor([0, 0, 0, 1, 1]), discount=0.5)
    assert to_go.tolist() == [3.0, 0.0, 4.0, 0.0, 2.0]


@given(st.data())
def test_whitened_numbers_have_mean_0_and_variance_1_and_are_0_outside_the_mask(data):
    batch = data.draw(packed_batches())
    x = data.draw(normals(len(batch)))
    white = whiten(torch.where(batch.mask, x, torch.nan), batch.mask, WHOLE)
    assert white.tolist() == pytest.approx(whitened(x.tolist(), batch.mask.tolist()), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("mask", [[0, 0], [0, 1]])
def test_fewer_than_two_numbers_whiten_to_zero(mask):
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor(mask, dtype=torch.bool), WHOLE).tolist() == [0, 0]


def test_an_unknown_estimator_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="advantage estimator 'grpoo'.*did you mean 'grpo'"):
        estimator("grpoo")


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("grpo", {"lam": 0.95}, "lam: 'grpo' does not read this knob"),
        ("gae", {"gamma": 1.1}, r"gamma is 1\.1; it must be in \[0, 1\]"),
        ("gae", {"lam": -0.1}, r"lam is -0\.1"),
        ("reinforce_plus_plus", {"gamma": 2.0}, r"gamma is 2\.0"),
    ],
)
def test_a_knob_that_cannot_be_is_named(name, knobs, message):
    with pytest.raises(ConfigError, match=r"algorithm\.adv_options\." + message):
        estimator(name, knobs, "algorithm.adv_options")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.rewards, "returned a Tensor, not Advantages"),
        (lambda x: Advantages(x.scores, x.rewards), r"returned advantages of shape \[2\]; .*per token.*\[3\]"),
        (lambda x: Advantages(x.rewards, x.rewards.sum()), r"returned returns of shape \[\]"),
    ],
)
def test_an_estimator_that_does_not_return_one_number_per_token_is_refused(returned, message):
    with pytest.raises(ConfigError, match=f"advantage estimator 'mine' .*{message}"):
        Estimator("mine", returned)(outcomes([5.0, 1.0], [0, 0], lengths=[2, 1]))


@pytest.mark.parametrize(("name", "broken"), [("advantages", [0.0, 1.0, math.nan]), ("returns", [0.0, 1.0, math.inf])])
def test_a_number_that_is_not_finite_is_named_with_its_trajectory(name, broken):
    """Where nothing trains it does no harm."""
    x = outcomes([5.0, 1.0], [0, 0], lengths=[2, 1])
    result = replace(Advantages(x.rewards, x.rewards), **{name: torch.tensor(broken)})
    with pytest.raises(DataError, match=f"'mine' returned {name} that are not finite, in trajectory 1"):
        Estimator("mine", None).check_finite(result, x)
    Estimator("mine", None).check_finite(result, replace(x, loss_mask=torch.tensor([True, True, False])))


@pytest.mark.parametrize(
    ("name", "message"),
    [("gae", "reads values .*critic=True"), ("remax", "reads reward_baselines .*greedy_baseline=True")],
)
def test_an_estimator_without_the_trait_that_brings_what_it_reads_is_told_so(name, message):
    with pytest.raises(ConfigError, match=message):
        estimate(name, outcomes([1.0, 2.0], [0, 0]))
