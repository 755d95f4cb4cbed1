from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.advantages import ESTIMATORS, AdvantageInputs
from mppo.algorithm.advantages.base import discounted_suffix_sum, no_reduction, whiten
from mppo.errors import ConfigError
from tests.unit.samples import over_parts, packed_batches, segments_of, vectors

pytestmark = pytest.mark.unit


def estimate(name, x, **knobs):
    return ESTIMATORS.get(name).bind(knobs, "algorithm.adv_options")(x)


def inputs_of(batch, rewards, values=None, reduce_sum=no_reduction):
    """Groups of two, as in `samples.batches`."""
    num_groups = int(batch.indices.max()) // 2 + 1
    return AdvantageInputs(rewards, batch.mask, batch.segments, batch.groups, num_groups, values, reduce_sum)


def outcomes(scores, groups, mask=None):
    """One action per trajectory, with this outcome."""
    count = len(scores)
    mask = torch.ones(count, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    rewards = torch.tensor(scores, dtype=torch.double)
    return AdvantageInputs(rewards, mask, segments_of(*[1] * count), torch.tensor(groups), max(groups) + 1)


def recursion(rewards, values, mask, gamma, lam):
    """GAE of one trajectory, backwards; a masked position hands on what came from behind it."""
    next_value, advantage, result = 0.0, 0.0, [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            result[t] = advantage = delta + gamma * lam * advantage
            next_value = values[t]
    return result


@given(st.data(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_is_the_recursion_over_the_actions_of_each_trajectory(data, gamma, lam):
    batch = data.draw(packed_batches(max_length=12))
    rewards, values = data.draw(vectors(2, len(batch)))
    rows = [x.split(batch.lengths) for x in (rewards, values, batch.mask)]
    raw = [a for row in zip(*rows, strict=True) for a in recursion(*(x.tolist() for x in row), gamma, lam)]
    raw = torch.tensor(raw, dtype=torch.double)

    result = estimate("gae", inputs_of(batch, rewards, values), gamma=gamma, lam=lam)
    torch.testing.assert_close(result.returns, torch.where(batch.mask, raw + values, 0.0))
    torch.testing.assert_close(result.advantages, whiten(raw, batch.mask, no_reduction), rtol=1e-6, atol=1e-6)


@given(st.data(), st.sampled_from([0.0, 0.9, 1.0]))
def test_reinforce_plus_plus_is_monte_carlo_gae_without_a_critic(data, gamma):
    batch = data.draw(packed_batches())
    rewards = data.draw(vectors(len(batch)))
    to_go = estimate("reinforce_plus_plus", inputs_of(batch, rewards), gamma=gamma)
    expected = estimate("gae", inputs_of(batch, rewards, torch.zeros_like(rewards)), gamma=gamma, lam=1.0)
    assert torch.equal(to_go.advantages, expected.advantages)
    assert torch.equal(to_go.returns, expected.returns)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
@given(st.data())
def test_estimators_of_returns_do_not_read_what_the_mask_hides(name, data):
    batch = data.draw(packed_batches())
    shown = data.draw(vectors(2, len(batch)))
    hidden = torch.where(batch.mask, shown, torch.nan)
    results = [estimate(name, inputs_of(batch, rewards, values)) for rewards, values in (shown, hidden)]
    assert torch.equal(results[0].advantages, results[1].advantages)
    assert torch.equal(results[0].returns, results[1].returns)


@given(st.lists(st.integers(0, 3), max_size=20).map(sorted), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.data())
def test_the_suffix_sum_is_the_loop(ids, discount, data):
    x = data.draw(vectors(len(ids)))
    expected = x.tolist()
    for t in reversed(range(len(ids) - 1)):
        expected[t] += discount * expected[t + 1] * (ids[t] == ids[t + 1])
    summed = discounted_suffix_sum(x, torch.tensor(ids, dtype=torch.long), discount)
    assert summed.tolist() == pytest.approx(expected)


@given(st.data())
def test_whitened_numbers_have_mean_0_and_variance_1_and_are_0_outside_the_mask(data):
    batch = data.draw(packed_batches())
    x = data.draw(vectors(len(batch)))
    white = whiten(torch.where(batch.mask, x, torch.nan), batch.mask, no_reduction)
    kept = white[batch.mask]
    assert (white[~batch.mask] == 0).all()
    assert kept.sum().item() == pytest.approx(0, abs=1e-9)
    if len(kept) > 1 and x[batch.mask].var() > 0:
        assert kept.var().item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("mask", [[0, 0], [0, 1]])
def test_fewer_than_two_numbers_whiten_to_zero(mask):
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor(mask, dtype=torch.bool), no_reduction).tolist() == [0, 0]


@pytest.mark.parametrize("name", ESTIMATORS.names())
@given(st.data())
def test_parts_of_a_batch_agree_with_the_whole(name, data):
    """Data-parallel ranks hold unequal parts, groups are spread over them, one may hold nothing."""
    batch = data.draw(packed_batches())
    rewards, values = data.draw(vectors(2, len(batch)))
    whole_inputs = inputs_of(batch, rewards, values)
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=len(batch.lengths), max_size=len(batch.lengths)))
    pieces = [batch.select([i for i, rank in enumerate(ranks) if rank == part]) for part in range(3)]

    def on_part(piece, reduce_sum):
        part = replace(
            whole_inputs,
            rewards=rewards[piece.origin],
            values=values[piece.origin],
            mask=piece.mask,
            segments=piece.segments,
            groups=piece.groups,
            reduce_sum=reduce_sum,
        )
        return estimate(name, part)

    whole, parts = estimate(name, whole_inputs), over_parts(pieces, on_part)
    for field in ("advantages", "returns"):
        together = batch.gather_back([p.origin for p in pieces], [getattr(part, field) for part in parts])
        torch.testing.assert_close(together, getattr(whole, field), rtol=1e-7, atol=1e-7)


def test_grpo_normalises_within_the_group():
    result = estimate("grpo", outcomes([1.0, 2.0, 6.0, 0.0, 4.0], [0, 0, 0, 1, 1]))
    expected = [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5, -2 / 8**0.5, 2 / 8**0.5]
    assert result.advantages.tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(result.returns, result.advantages)


def test_dr_grpo_only_centres():
    result = estimate("grpo", outcomes([1.0, 2.0, 6.0], [0, 0, 0]), norm_adv_by_std_in_grpo=False)
    assert result.advantages.tolist() == pytest.approx([-2, -1, 3])


@pytest.mark.parametrize("by_std", [True, False])
def test_a_group_of_one_keeps_its_score(by_std):
    x = outcomes([3.0, 1.0, 5.0], [0, 1, 1])
    assert estimate("grpo", x, norm_adv_by_std_in_grpo=by_std).advantages[0].item() == 3.0


def test_a_group_of_equals_has_no_advantage():
    assert estimate("grpo", outcomes([0.1] * 3, [0] * 3)).advantages.tolist() == pytest.approx([0] * 3, abs=1e-9)


def test_a_trajectory_that_does_not_train_does_not_move_its_group():
    with_rejected = estimate("grpo", outcomes([1.0, 3.0, 100.0], [0, 0, 0], mask=[1, 1, 0])).advantages
    without = estimate("grpo", outcomes([1.0, 3.0], [0, 0])).advantages
    assert with_rejected.tolist() == [*without.tolist(), 0.0]


def test_rejecting_a_token_does_not_erase_its_reward():
    """The outcome stands at a position that no longer trains; its trajectory still has the score."""
    x = outcomes([0.0, 4.0, 0.0, 2.0], [0, 0], mask=[1, 0, 1, 1])
    x = replace(x, segments=segments_of(2, 2))
    result = estimate("grpo", x, norm_adv_by_std_in_grpo=False)
    assert result.advantages.tolist() == [1.0, 0.0, -1.0, -1.0]


def test_an_unknown_estimator_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="advantage estimator 'grpoo'.*did you mean 'grpo'"):
        ESTIMATORS.get("grpoo")


def test_a_knob_of_another_estimator_is_named():
    with pytest.raises(ConfigError, match=r"algorithm\.adv_options\.lam: 'grpo' does not read this knob"):
        ESTIMATORS.get("grpo").configure({"lam": 0.95}, "algorithm.adv_options")
