import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.policy_losses import POLICY_LOSSES, PolicyInputs, anchor_statistics
from mppo.errors import ConfigError
from tests.unit.samples import masked_sum, packed_batches, segments_of, vectors

pytestmark = pytest.mark.unit


def inputs(log_ratios, advantages):
    """Tokens whose log-prob was -1.2 under the old policy."""
    old = torch.full((len(log_ratios),), -1.2, dtype=torch.double)
    log_probs = (old + torch.tensor(log_ratios, dtype=torch.double)).requires_grad_()
    mask = torch.ones(len(old), dtype=torch.bool)
    return PolicyInputs(log_probs, old, torch.tensor(advantages).double(), mask, segments_of(len(old)))


def vanilla(x, **knobs):
    return POLICY_LOSSES.get("vanilla").bind(knobs, "actor.policy_loss")(x)


def loss_and_gradient(advantage, log_ratio, **knobs):
    x = inputs([log_ratio], [advantage])
    loss = vanilla(x, **knobs).loss
    loss.sum().backward()
    return loss.item(), x.log_probs.grad.item()


def test_the_ratio_of_probabilities():
    """Section 3.1: log-prob -1.2 before, -1.0 now; above 1 the action became likelier, below 1 less likely."""
    likelier, same, less_likely = inputs([0.2, 0.0, -0.2], [0.0] * 3).log_ratio.exp().tolist()
    assert likelier == pytest.approx(math.exp(0.2)) == pytest.approx(1.221, abs=5e-4)
    assert same == 1.0
    assert less_likely == pytest.approx(1 / likelier)


def test_the_log_ratio_is_clamped_and_has_no_gradient_beyond():
    """Section 3."""
    x = inputs([-1000.0, -20.5, -19.5, 19.5, 20.5, 1000.0], [1.0] * 6)
    x.log_ratio.sum().backward()
    assert x.log_ratio.tolist() == pytest.approx([-20, -20, -19.5, 19.5, 20, 20])
    assert x.log_probs.grad.tolist() == [0, 0, 1, 1, 0, 0]
    assert anchor_statistics(x)["log_ratio_saturated"].reduce(x.mask).value == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("advantage", "loss", "gradient"),
    [
        (1.0, -1.2, 0.0),  # section 4.2: unclipped 1.221, clipped 1.2
        (-1.0, math.exp(0.2), math.exp(0.2)),  # section 4.3: the larger loss counts
        (0.0, 0.0, 0.0),
    ],
)
def test_an_action_that_became_likelier(advantage, loss, gradient):
    assert loss_and_gradient(advantage, 0.2) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss"),
    [(-1.0, 5.0, 3.0), (-1.0, 2.5, 2.5), (-2.0, 5.0, 6.0), (1.0, 5.0, -1.2), (1.0, 0.5, -0.5), (-1.0, 0.5, 0.8)],
)
def test_the_dual_clip_bounds_the_loss_of_bad_actions_only(advantage, ratio, loss):
    """Section 4.4: clip 0.2, C 3."""
    assert loss_and_gradient(advantage, math.log(ratio), clip_ratio=0.2, clip_ratio_c=3.0)[0] == pytest.approx(loss)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [(-1.0, 5.0, 0.0), (-1.0, 2.5, 2.5), (1.0, 1.1, -1.1), (1.0, 1.3, 0.0), (-1.0, 0.7, 0.0), (1.0, 0.7, -0.7)],
)
def test_the_gradient_flows_through_the_branch_that_counts(advantage, ratio, gradient):
    assert loss_and_gradient(advantage, math.log(ratio))[1] == pytest.approx(gradient)


@given(vectors(6), vectors(6))
def test_on_policy_it_is_the_policy_gradient(advantages, log_probs):
    log_probs.requires_grad_()
    mask = torch.ones(6, dtype=torch.bool)
    vanilla(PolicyInputs(log_probs, log_probs.detach(), advantages, mask, segments_of(6))).loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)


@pytest.mark.parametrize(
    ("knobs", "good", "bad"),
    [
        ({"clip_ratio": 0.1}, -1.1, 0.9),
        ({"clip_ratio": 0.1, "clip_ratio_high": 0.28}, -1.28, 0.9),
        ({"clip_ratio": 0.1, "clip_ratio_low": 0.3}, -1.1, 0.7),
        ({"clip_ratio": 0.1, "clip_ratio_low": 0.0, "clip_ratio_high": 0.0}, -1.0, 1.0),
    ],
)
def test_clip_ratio_sets_both_sides_unless_a_side_is_given(knobs, good, bad):
    assert loss_and_gradient(1.0, math.log(2.0), **knobs)[0] == pytest.approx(good)
    assert loss_and_gradient(-1.0, math.log(0.5), **knobs)[0] == pytest.approx(bad)


def test_statistics_tell_what_was_clipped():
    x = inputs([math.log(r) for r in (1.5, 1.5, 0.5, 5.0, 1.1)], [1.0, -1.0, -1.0, -1.0, 1.0])
    value = {name: s.reduce(x.mask).value for name, s in (vanilla(x).statistics | anchor_statistics(x)).items()}
    assert value["pg_clipfrac"] == 2 / 5
    assert value["pg_clipfrac_lower"] == 1 / 5
    assert value["ppo_kl"] == pytest.approx(-math.log(1.5 * 1.5 * 0.5 * 5.0 * 1.1) / 5)
    assert value["ratio_deviation"] == pytest.approx((0.5 + 0.5 + 0.5 + 4.0 + 0.1) / 5)
    assert value["log_ratio_saturated"] == 0.0


@given(st.data())
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient_nor_statistics(data):
    batch = data.draw(packed_batches())
    shown, hidden = data.draw(vectors(2, 3, len(batch)))

    def evaluate(log_probs, old_log_probs, advantages):
        log_probs = log_probs.clone().requires_grad_()
        result = vanilla(PolicyInputs(log_probs, old_log_probs, advantages, batch.mask, batch.segments))
        total = masked_sum(result.loss, batch.mask, torch.ones(len(batch)))
        total.backward()
        statistics = {name: s.reduce(batch.mask).value for name, s in result.statistics.items()}
        return total.item(), log_probs.grad.tolist(), statistics

    assert evaluate(*torch.where(batch.mask, shown, 1e6 * hidden)) == evaluate(*shown)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"clip_ratio_c": 1.0}, r"policy_loss\.clip_ratio_c is 1\.0"),
        ({"clip_ratio": -0.1}, r"policy_loss\.clip_ratio "),
        ({"clip_ratio_low": -0.1}, r"policy_loss\.clip_ratio_low is -0\.1"),
        ({"clip_ratio_high": -0.1}, r"policy_loss\.clip_ratio_high is -0\.1"),
        ({"clip_range": 0.2}, r"actor\.policy_loss\.clip_range: .*did you mean 'clip_ratio'"),
    ],
)
def test_a_wrong_knob_is_named(knobs, named):
    with pytest.raises(ConfigError, match=named):
        POLICY_LOSSES.get("vanilla").configure(knobs, "actor.policy_loss")


def test_an_unknown_loss_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="policy loss 'vanila'.*did you mean 'vanilla'"):
        POLICY_LOSSES.get("vanila")
