"""Each policy loss on numbers that can be followed by hand."""

import math
from dataclasses import replace
from math import exp, log

import pytest
import torch

from mppo.algorithm.policy_losses import policy_loss
from tests.unit.policy_cases import losses_and_gradient, tokens
from tests.unit.samples import segments_of

pytestmark = pytest.mark.unit


def one_token(name, advantage, ratio, old=-1.2, **knobs):
    """Loss and gradient of a token that is `ratio` times as likely as under the anchor."""
    losses, gradient = losses_and_gradient(policy_loss(name, knobs), tokens([log(ratio)], [advantage], old))
    return losses[0], gradient[0]


def numbers(name, x, **knobs):
    return {key: s.reduce(x.mask).value for key, s in policy_loss(name, knobs)(x).statistics.items()}


@pytest.mark.parametrize(
    ("advantage", "loss", "gradient"),
    [
        (1.0, -1.2, 0.0),  # section 4.2: unclipped 1.221, clipped 1.2
        (-1.0, exp(0.2), exp(0.2)),  # section 4.3: the larger loss counts
        (0.0, 0.0, 0.0),
    ],
)
def test_vanilla_for_an_action_that_became_likelier(advantage, loss, gradient):
    assert one_token("vanilla", advantage, exp(0.2)) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss"),
    [(-1.0, 5.0, 3.0), (-1.0, 2.5, 2.5), (-2.0, 5.0, 6.0), (1.0, 5.0, -1.2), (1.0, 0.5, -0.5), (-1.0, 0.5, 0.8)],
)
@pytest.mark.parametrize("name", ["vanilla", "bypass_mode"])
def test_the_dual_clip_bounds_the_loss_of_bad_actions_only(name, advantage, ratio, loss):
    """Section 4.4: clip 0.2, C 3."""
    assert one_token(name, advantage, ratio, clip_ratio=0.2, clip_ratio_c=3.0)[0] == pytest.approx(loss)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [(-1.0, 5.0, 0.0), (-1.0, 2.5, 2.5), (1.0, 1.1, -1.1), (1.0, 1.3, 0.0), (-1.0, 0.7, 0.0), (1.0, 0.7, -0.7)],
)
@pytest.mark.parametrize("name", ["vanilla", "bypass_mode"])
def test_the_gradient_of_vanilla_flows_through_the_branch_that_counts(name, advantage, ratio, gradient):
    assert one_token(name, advantage, ratio)[1] == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("knobs", "good", "bad"),
    [
        ({"clip_ratio": 0.1}, -1.1, 0.9),
        ({"clip_ratio": 0.1, "clip_ratio_high": 0.28}, -1.28, 0.9),
        ({"clip_ratio": 0.1, "clip_ratio_low": 0.3}, -1.1, 0.7),
        ({"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}, -1.0, 1.0),
    ],
)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "clip_cov"])
def test_clip_ratio_sets_both_sides_unless_a_side_is_given(name, knobs, good, bad):
    def loss(advantage, ratio):
        x = tokens([log(ratio)], [advantage], prepared={"covers": torch.tensor([False])})
        return policy_loss(name, knobs)(x).loss.item()

    assert loss(1.0, 2.0) == pytest.approx(good)
    assert loss(-1.0, 0.5) == pytest.approx(bad)


def test_vanilla_tells_what_was_clipped():
    x = tokens([log(r) for r in (1.5, 1.5, 0.5, 5.0, 1.1)], [1.0, -1.0, -1.0, -1.0, 1.0])
    value = numbers("vanilla", x)
    assert value["pg_clipfrac"] == 2 / 5
    assert value["pg_clipfrac_lower"] == 1 / 5
    assert value["ppo_kl"] == pytest.approx(-log(1.5 * 1.5 * 0.5 * 5.0 * 1.1) / 5)
    assert value["ratio_deviation"] == pytest.approx((0.5 + 0.5 + 0.5 + 4.0 + 0.1) / 5)
    assert value["log_ratio_saturated"] == 0.0


@pytest.mark.parametrize(
    ("advantage", "q", "p", "kept"),
    [
        (1.0, 0.3, 0.45, True),
        (1.0, 0.3, 0.55, False),  # a good action 0.25 likelier
        (-1.0, 0.3, 0.55, True),
        (1.0, 0.6, 0.3, True),
        (-1.0, 0.6, 0.3, False),  # a bad one 0.3 less likely
        (-1.0, 0.6, 0.45, True),
    ],
)
def test_dppo_tv_lets_a_token_go_whose_probability_has_moved_far_enough(advantage, q, p, kept):
    """The ratio carries no gradient: it weighs the log-prob, as a constant."""
    factor = -advantage * p / q if kept else 0.0
    assert one_token("dppo_tv", advantage, p / q, old=log(q)) == pytest.approx((factor * log(p), factor))


def bernoulli_kl(q, p):
    return q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))


@pytest.mark.parametrize(
    ("advantage", "q", "p", "divergence", "kept"),
    [
        (1.0, 0.3, 0.45, 0.047, True),
        (1.0, 0.1, 0.6, 0.551, False),
        (-1.0, 0.1, 0.6, 0.551, True),  # far, but against what the advantage asks for
        (-1.0, 0.6, 0.1, 0.751, False),
        (1.0, 0.6, 0.1, 0.751, True),
        (-1.0, 0.6, 0.45, 0.045, True),
    ],
)
def test_dppo_kl_lets_a_token_go_whose_divergence_is_large_enough(advantage, q, p, divergence, kept):
    assert bernoulli_kl(q, p) == pytest.approx(divergence, abs=1e-3)
    factor = -advantage * p / q if kept else 0.0
    assert one_token("dppo_kl", advantage, p / q, old=log(q)) == pytest.approx((factor * log(p), factor))


@pytest.mark.parametrize(
    ("name", "q", "p", "knobs", "kept"),
    [
        ("dppo_tv", 0.3, 0.55, {"clip_ratio_high": 0.3}, True),
        ("dppo_tv", 0.3, 0.55, {"clip_ratio_low": 0.3}, False),
        ("dppo_tv", 0.6, 0.35, {"clip_ratio_low": 0.3}, True),
        ("dppo_tv", 0.6, 0.35, {"clip_ratio_high": 0.3}, False),
        ("dppo_kl", 0.1, 0.6, {"clip_ratio_high": 0.6}, True),
        ("dppo_kl", 0.1, 0.6, {"clip_ratio_low": 0.6}, False),
        ("dppo_kl", 0.6, 0.1, {"clip_ratio_low": 0.8}, True),
        ("dppo_kl", 0.6, 0.1, {"clip_ratio_high": 0.8}, False),
    ],
)
def test_dppo_bounds_good_actions_above_and_bad_ones_below(name, q, p, knobs, kept):
    """Here an action moves where its advantage pushes it."""
    _, gradient = one_token(name, 1.0 if p > q else -1.0, p / q, old=log(q), **knobs)
    assert (gradient != 0) == kept


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(("knobs", "cap"), [({}, 20.0), ({"ratio_cap": 3.0}, 3.0), ({"ratio_cap": 1e4}, 100.0)])
def test_dppo_caps_its_ratio(name, knobs, cap):
    """From 0.001 to 0.1, a hundred times likelier."""
    assert one_token(name, 1.0, 100.0, old=log(0.001), **knobs) == pytest.approx((-cap * log(0.1), -cap))


def test_dppo_tells_what_it_let_go_and_what_it_capped():
    x = tokens([log(1.1), log(10.0), log(30.0)], [1.0, 1.0, 1.0], old=log(0.03))  # 0.033, 0.3, 0.9
    value = numbers("dppo_tv", x, clip_ratio=0.5, ratio_cap=5.0)
    assert (value["pg_clipfrac"], value["pg_clipfrac_lower"]) == pytest.approx((1 / 3, 1 / 3))
    assert value["ppo_kl"] == pytest.approx(-log(1.1 * 10 * 30) / 3)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "weight", "gradient"),
    [
        ([0.3, -0.1], 2.0, exp(0.1), -2 * exp(0.1)),
        ([0.5, 0.1], 1.0, 1.2, 0.0),
        ([0.5, 0.1], -1.0, exp(0.3), exp(0.3)),
        ([-0.5, -0.1], -1.0, 0.8, 0.0),
        ([12.0, 6.0], -1.0, exp(9.0), exp(9.0)),
        ([14.0, 8.0], -1.0, exp(10.0), 0.0),  # a mean log-ratio of 11 is clamped
    ],
)
def test_gspo_gives_each_token_the_ratio_of_its_sequence(log_ratios, advantage, weight, gradient):
    """The value is the geometric mean of the token ratios; the gradient of each token is its own."""
    losses, gradients = losses_and_gradient(policy_loss("gspo"), tokens(log_ratios, [advantage] * 2))
    assert losses == pytest.approx([-weight * advantage] * 2)
    assert gradients == pytest.approx([gradient] * 2)


def test_gspo_keeps_sequences_apart_and_tells_what_it_clamps():
    x = tokens([0.1, 0.3, 30.0, 2.0], [1.0, 1.0, -1.0, -1.0])
    x = replace(x, segments=segments_of(2, 2))
    assert policy_loss("gspo")(x).loss.tolist() == pytest.approx([-1.2, -1.2, exp(10), exp(10)])
    value = numbers("gspo", x)
    assert (value["pg_clipfrac"], value["log_ratio_saturated"]) == (0.5, 0.5)
    assert value["ppo_kl"] == pytest.approx(-32.4 / 4)  # of the log-ratios as they are


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.5), (-2.0, 3.0)])
def test_sapo_closes_a_smooth_gate(ratio, advantage, tau):
    gate = 1 / (1 + exp(-tau * (ratio - 1)))
    expected = (-4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage)
    assert one_token("sapo", advantage, ratio, tau_pos=1.5, tau_neg=3.0) == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (4.0, 1.2), (1e12, 1.2)])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_cispo_clips_the_weight_and_never_the_gradient(ratio, weight, advantage):
    expected = (-weight * advantage * (-1.2 + log(ratio)), -weight * advantage)
    assert one_token("cispo", advantage, ratio) == pytest.approx(expected)


def test_cispo_tells_what_it_clips_on_either_side():
    assert numbers("cispo", tokens([log(r) for r in (0.5, 1.1, 4.0, 1.0)], [1.0] * 4))["pg_clipfrac"] == 0.5


@pytest.mark.parametrize("ratio", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("advantage", [0.0, 1.5, -1.5])
def test_dro_pulls_back_to_the_anchor(ratio, advantage):
    """The pull `beta d` is there whatever the advantage."""
    d = log(ratio)
    expected = (-(advantage * (-1.2 + d) - 0.25 * d**2), -(advantage - 0.5 * d))
    assert one_token("dro", advantage, ratio, dro_beta=0.5) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
@pytest.mark.parametrize("ratio", [0.01, 1.0, 100.0])
def test_the_plain_policy_gradient_does_not_read_the_anchor(name, ratio):
    log_prob = log(0.4)
    assert one_token(name, 2.0, ratio, old=log_prob - log(ratio)) == pytest.approx((-2 * log_prob, -2.0))


@pytest.mark.parametrize(
    ("advantages", "log_ratios", "loss", "gradient"),
    [
        ([1.0, 1.0], [0.1, 0.5], -exp(0.15), [-exp(0.15) / 2, 0.0]),
        ([1.0, 1.0], [-0.5, -0.1], -exp(-0.3), [-exp(-0.3) / 2] * 2),
        ([-1.0, -1.0], [-0.5, 0.5], exp(0.15), [0.0, exp(0.15) / 2]),
        ([2.0, 0.0], [0.1, 0.9], -exp(0.05), [-exp(0.05) / 2, 0.0]),  # an advantage of 0 stands for a log-ratio of 0
    ],
)
def test_geo_mean_clips_the_logarithm_of_each_ratio(advantages, log_ratios, loss, gradient):
    """`-mean(A) exp(mean of the clipped log-ratios)` for each token; the mean over both is the sequence's loss."""
    x = tokens(log_ratios, advantages)
    losses, gradients = losses_and_gradient(policy_loss("geo_mean"), x)
    assert losses == pytest.approx([loss] * 2)
    assert [g / 2 for g in gradients] == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("weights", "weight"), [([2.0, 4.5], 3.0), ([0.5, 0.5], 0.5), ([2.0, 0.0], 2.0), ([0.0, 0.0], 0.0)]
)
def test_geo_mean_weighs_a_sequence_by_the_geometric_mean_of_the_weights_that_are_not_zero(weights, weight):
    x = tokens([0.0, 0.0], [1.0, 3.0], rollout_is_weights=torch.tensor(weights))
    assert policy_loss("geo_mean")(x).loss.tolist() == pytest.approx([-2 * weight] * 2)


def test_geo_mean_tells_what_it_clips_for_good_and_for_bad_actions():
    x = tokens([0.5, -0.5, 0.5, 0.1, 0.9], [1.0, 1.0, -1.0, -1.0, 0.0])
    value = numbers("geo_mean", x)
    assert (value["pg_clipfrac"], value["pg_clipfrac_lower"]) == (2 / 5, 1 / 5)
    assert value["ppo_kl"] == pytest.approx(-1.5 / 5)


def test_bypass_with_reinforce_is_the_policy_gradient():
    x = tokens([0.3, -2.0], [1.0, -2.0])
    losses, gradient = losses_and_gradient(policy_loss("bypass_mode", {"loss_type": "reinforce"}), x)
    assert losses == pytest.approx([0.9, -6.4])
    assert gradient == pytest.approx([-1.0, 2.0])


@pytest.mark.parametrize("name", ["vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo", "geo_mean", "bypass_mode"])
@pytest.mark.parametrize("log_ratio", [-1000.0, -25.0, 25.0, 1000.0])
def test_the_reported_distance_saturates_with_the_clamp(name, log_ratio):
    assert numbers(name, tokens([log_ratio], [1.0], old=-1.0))["ppo_kl"] == -math.copysign(20.0, log_ratio)


@pytest.mark.parametrize("name", ["gspo", "dro", "reinforce"])
def test_losses_that_do_not_clamp_report_the_distance_as_it_is(name):
    knobs = {"dro_beta": 1.0} if name == "dro" else {}
    assert numbers(name, tokens([-25.0], [1.0]), **knobs)["ppo_kl"] == pytest.approx(25.0)


@pytest.mark.parametrize("name", ["vanilla", "sapo", "kl_cov", "bypass_mode"])
def test_no_gradient_flows_through_a_ratio_beyond_the_clamp(name):
    """With a bad action e^21 times as likely the loss is at its largest, and says nothing of the way back."""
    x = tokens([21.0], [-1.0], old=-22.0, prepared={"covers": torch.tensor([False])})
    assert losses_and_gradient(policy_loss(name), x)[1] == [0.0]
