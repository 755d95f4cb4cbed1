"""Clip-Cov and KL-Cov: which tokens they choose, and what becomes of them."""

from dataclasses import replace
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.policy_losses import MiniBatchInputs, policy_loss
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.policy_cases import losses_and_gradient, mini_batches, prepared, tokens
from tests.unit.samples import assignments, held_by, segments_of

pytestmark = pytest.mark.unit

BAND = {"clip_cov_lb": -1e9, "clip_cov_ub": 1e9}


def chosen(name, advantages, log_probs, old_log_probs=None, mask=None, seed=0, **knobs):
    """The places of the tokens that the loss chooses."""
    log_probs, advantages = (torch.tensor(x, dtype=torch.double) for x in (log_probs, advantages))
    old = log_probs if old_log_probs is None else torch.tensor(old_log_probs, dtype=torch.double)
    count = len(log_probs)
    mask = torch.ones(count).bool() if mask is None else torch.tensor(mask).bool()
    places, segments = torch.arange(count), segments_of(count)
    x = MiniBatchInputs(log_probs, old, advantages, mask, segments, places, seed)
    return policy_loss(name, knobs).prepare(x)["covers"].nonzero().squeeze(-1).tolist()


def covariances(batch, log_probs):
    """By the definition, over the tokens that train."""
    kept = [(i, batch["advantages"][i].item(), log_probs[i].item()) for i in batch.mask.nonzero().squeeze(-1).tolist()]
    mean_advantage, mean_log_prob = (sum(row[k] for row in kept) / max(len(kept), 1) for k in (1, 2))
    return {i: (advantage - mean_advantage) * (log_prob - mean_log_prob) for i, advantage, log_prob in kept}


@given(mini_batches(), st.sampled_from([0.01, 0.3, 0.5, 1.0]))
def test_kl_cov_holds_the_tokens_of_the_highest_covariance(mini_batch, share):
    batch, log_probs = mini_batch
    cov = covariances(batch, log_probs)
    count = max(int(share * len(cov)), 1)
    covers = prepared(policy_loss("kl_cov", {"kl_cov_ratio": share}), batch, log_probs).prepared["covers"]
    assert covers.nonzero().squeeze(-1).tolist() == sorted(sorted(cov, key=cov.get, reverse=True)[:count])


def test_of_tokens_with_equal_covariance_the_earlier_are_held():
    advantages, log_probs = [1.0, -1.0, -1.0, 1.0, 0.0], [-1.0, -3.0, -3.0, -1.0, -2.0]
    assert chosen("kl_cov", advantages, log_probs, kl_cov_ratio=0.6) == [0, 1, 2]


@given(mini_batches(), st.integers(0, 100), st.sampled_from([0.01, 0.3, 1.0]))
def test_clip_cov_draws_from_the_tokens_in_the_band_that_are_not_clipped_already(mini_batch, seed, share):
    batch, log_probs = mini_batch
    cov = covariances(batch, log_probs)

    def silenced(i):
        ratio, advantage = (log_probs[i] - batch["old_log_probs"][i]).exp().item(), batch["advantages"][i].item()
        return ratio > 1.2 if advantage > 0 else ratio < 0.8

    candidates = {i for i, c in cov.items() if -0.5 < c < 0.5 and not silenced(i)}
    knobs = {"clip_cov_ratio": share, "clip_cov_lb": -0.5, "clip_cov_ub": 0.5}
    covers = prepared(policy_loss("clip_cov", knobs), batch, log_probs, seed=seed).prepared["covers"]
    drawn = covers.nonzero().squeeze(-1).tolist()
    assert set(drawn) <= candidates
    assert len(drawn) == min(max(int(share * len(cov)), 1), len(candidates))


def test_the_band_of_clip_cov_does_not_hold_its_edges():
    """The covariances are 1, 0, 1, 0.25, 0.25 (means 0 and -2)."""
    advantages, log_probs = [1.0, 0.0, -1.0, 0.5, -0.5], [-1.0, -2.0, -3.0, -1.5, -2.5]
    drawn = [
        chosen("clip_cov", advantages, log_probs, clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high)
        for low, high in [(-1.0, 1.0), (0.0, 2.0), (0.25, 1.5), (1.0, 5.0)]
    ]
    assert drawn == [[1, 3, 4], [0, 2, 3, 4], [0, 2], []]


def test_clip_cov_draws_other_tokens_at_another_step():
    draws = [
        tuple(chosen("clip_cov", [0.0] * 100, [-1.0] * 100, seed=seed, clip_cov_ratio=0.1, **BAND)) for seed in range(5)
    ]
    assert {len(draw) for draw in draws} == {10}
    assert len(set(draws)) == 5


def test_clip_cov_draws_every_token_about_equally_often():
    counts = [0] * 10
    for seed in range(200):
        for i in chosen("clip_cov", [0.0] * 10, [-1.0] * 10, seed=seed, clip_cov_ratio=0.5, **BAND):
            counts[i] += 1
    assert sum(counts) == 1000
    assert all(70 < count < 130 for count in counts)  # 100 +- 4 deviations


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_at_least_one_token_is_chosen_and_none_that_the_mask_hides(name):
    band = BAND if name == "clip_cov" else {}
    assert len(chosen(name, [1.0, 2.0, 3.0], [-1.0, -2.0, -3.0], **band)) == 1
    assert chosen(name, [1.0, 50.0, 3.0], [-1.0, 50.0, -3.0], mask=[1, 0, 0], **band) == [0]
    assert chosen(name, [1.0, 2.0], [-1.0, -2.0], mask=[0, 0], **band) == []


@settings(max_examples=20)
@pytest.mark.parametrize(
    ("name", "knobs"), [("clip_cov", {"clip_cov_ratio": 0.4, **BAND}), ("kl_cov", {"kl_cov_ratio": 0.4})]
)
@given(mini_batches(), st.data(), st.integers(0, 100))
def test_the_choice_is_the_same_whatever_ranks_hold_the_tokens(name, knobs, mini_batch, data, seed):
    batch, log_probs = mini_batch
    loss = policy_loss(name, knobs)
    held = held_by(data.draw(assignments(len(batch.lengths))))

    def on_rank(part, reduction):
        mine = log_probs[part.origin]
        return prepared(loss, part, mine, part.origin, seed, reduction).prepared["covers"]

    parts = [batch.select(rows) for rows in held]
    together = batch.gather_back([part.origin for part in parts], on_simulated_ranks(parts, on_rank))
    assert torch.equal(together, prepared(loss, batch, log_probs, seed=seed).prepared["covers"])


def test_clip_cov_takes_loss_and_gradient_from_the_chosen_only():
    x = tokens([log(r) for r in (0.5, 1.5, 1.5, 1.1)], [1.0, 1.0, -1.0, 2.0])
    x = replace(x, prepared={"covers": torch.tensor([True, False, False, False])})
    loss = policy_loss("clip_cov")
    losses, gradient = losses_and_gradient(loss, x)
    assert losses == pytest.approx([0.0, -1.2, 1.5, -2.2])
    assert gradient == pytest.approx([0.0, 0.0, 1.5, -2.2])
    value = {name: s.reduce(x.mask).value for name, s in loss(x).statistics.items()}
    assert value["pg_clipfrac"] == 1 / 4  # what was chosen, not what PPO clips
    assert value["ppo_kl"] == pytest.approx(-log(0.5 * 1.5 * 1.5 * 1.1) / 4)


def test_clip_cov_has_no_dual_clip():
    x = tokens([log(50.0)], [-1.0], prepared={"covers": torch.tensor([False])})
    assert losses_and_gradient(policy_loss("clip_cov"), x) == (pytest.approx([50.0]), pytest.approx([50.0]))


def test_kl_cov_clips_nothing_and_adds_a_penalty_to_the_chosen():
    ratios, advantages = (0.5, 1.5, 4.0), [1.0, -1.0, 2.0]
    x = tokens([log(r) for r in ratios], advantages, prepared={"covers": torch.tensor([True, True, False])})
    loss = policy_loss("kl_cov", {"ppo_kl_coef": 0.3})
    losses, gradient = losses_and_gradient(loss, x)
    assert losses == pytest.approx([-0.5 + 0.3 * log(2), 1.5 + 0.3 * log(1.5), -8.0])
    assert gradient == pytest.approx([-0.5 - 0.3, 1.5 + 0.3, -8.0])
    distance = loss(x).statistics["ppo_kl"].reduce(x.mask).value
    assert distance == pytest.approx((log(2) + log(1.5) + log(4)) / 3)  # absolute, unlike the other losses


def test_the_penalty_of_kl_cov_still_pulls_where_the_ratio_is_clamped():
    x = tokens([-25.0, 25.0], [1.0, 1.0], old=-30.0, prepared={"covers": torch.tensor([True, True])})
    assert losses_and_gradient(policy_loss("kl_cov"), x)[1] == pytest.approx([-0.1, 0.1])
