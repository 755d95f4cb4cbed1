import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.kl import KL_FORMS, KLController, check_kl_form, full, kl_penalty, kl_saturated
from mppo.errors import ConfigError
from tests.unit.samples import vectors

pytestmark = pytest.mark.unit


def value_and_gradient(form, d):
    """Of one token whose log-prob is `d` above the reference."""
    log_prob = torch.tensor([d - 1.5], dtype=torch.double, requires_grad=True)
    value = kl_penalty(log_prob, torch.tensor([-1.5], dtype=torch.double), form)
    value.sum().backward()
    return value.item(), log_prob.grad.item()


@pytest.mark.parametrize(
    ("form", "d", "value", "gradient"),
    [
        ("k1", 0.3, 0.3, 1.0),
        ("k1", -0.3, -0.3, 1.0),
        ("abs", -0.3, 0.3, -1.0),
        ("k2", -0.3, 0.045, -0.3),
        ("k3", 0.0, 0.0, 0.0),
        ("k3", 0.3, math.exp(-0.3) + 0.3 - 1, 1 - math.exp(-0.3)),
        ("k3", -5.0, 10.0, 0.0),
        ("k3", 12.0, 10.0, 0.0),
        ("k3", 30.0, 10.0, 0.0),
        ("k3", -2.6, math.exp(2.6) - 2.6 - 1, 1 - math.exp(2.6)),
    ],
)
def test_forms(form, d, value, gradient):
    """k3 is clipped at 10, where its gradient is 0."""
    assert value_and_gradient(form, d) == pytest.approx((value, gradient))


@pytest.mark.parametrize(("alias", "form"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_aliases(alias, form):
    assert KL_FORMS.get(alias).fn is KL_FORMS.get(form).fn


@pytest.mark.parametrize("form", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("d", [-5.0, -0.3, 0.0, 0.7, 25.0])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(form, d):
    value, _ = value_and_gradient(form, d)
    assert value_and_gradient(form + "+", d) == pytest.approx((value, d))


@given(vectors(4), vectors(4))
def test_k1_and_k3_are_unbiased(logits, ref_logits):
    """Their mean over all actions, weighted by the policy, is the exact divergence."""
    log_probs, ref_log_probs = logits.log_softmax(0), ref_logits.log_softmax(0)
    exact = torch.nn.functional.kl_div(ref_log_probs, log_probs, log_target=True, reduction="sum").item()
    unsaturated = (log_probs - ref_log_probs).min() > -2.6
    for form in ["k1", "k3"] if unsaturated else ["k1"]:
        mean = (log_probs.exp() * kl_penalty(log_probs, ref_log_probs, form)).sum().item()
        assert mean == pytest.approx(exact, abs=1e-12)


@given(st.floats(-1e4, 1e4))
def test_k3_is_never_negative_and_bounded(d):
    value, gradient = value_and_gradient("k3", d)
    assert -1e-12 <= value <= 10.0
    assert math.isfinite(gradient)


@given(vectors(3, 5), vectors(3, 5))
def test_full_is_the_divergence_over_the_vocabulary(logits, ref_logits):
    """And its gradient by the logits is `p (log p - log q - KL)`."""
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    value = full(log_p, log_q)
    value.sum().backward()
    exact = [
        sum(math.exp(p) * (p - q) for p, q in zip(*rows, strict=True))
        for rows in zip(log_p.tolist(), log_q.tolist(), strict=True)
    ]
    assert value.tolist() == pytest.approx(exact, abs=1e-12)
    assert all(kl >= -1e-12 for kl in exact)
    gradient = log_p.exp() * (log_p - log_q - value[:, None])
    torch.testing.assert_close(logits.grad, gradient.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["k4", "k3++"])
def test_an_unknown_form_is_named(form):
    for use in (lambda: kl_penalty(torch.zeros(1), torch.zeros(1), form), lambda: check_kl_form(form, "there")):
        with pytest.raises(ConfigError, match=f"unknown KL form '{re.escape(form.removesuffix('+'))}'"):
            use()


def test_full_cannot_come_from_the_log_probs_of_samples():
    with pytest.raises(ConfigError, match="the full KL is over the vocabulary"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


def test_full_with_a_gradient_of_k2_is_refused_at_its_place():
    with pytest.raises(ConfigError, match=r"actor\.kl_loss_type=full\+: .*use full"):
        check_kl_form("full+", "actor.kl_loss_type")


@pytest.mark.parametrize("form", [*KL_FORMS.names(), "k1+", "k2+", "k3+", "abs+", "low_var_kl+"])
def test_every_other_form_may_be_chosen(form):
    assert check_kl_form(form, "there") is None


@pytest.mark.parametrize("form", ["k3", "low_var_kl"])
@given(st.floats(-30, 30))
def test_k3_is_saturated_where_its_gradient_is_gone(form, d):
    """At d = 0 the gradient is 0 without any clamp."""
    value, gradient = value_and_gradient(form, d)
    saturated = kl_saturated(torch.tensor([d], dtype=torch.double), torch.zeros(1), form).item()
    assert saturated == (value == 10.0)
    if abs(d) > 1e-6 and not 11 - 1e-3 < d < 11 + 1e-3:
        assert saturated == (gradient == 0.0)


@pytest.mark.parametrize(("d", "saturated"), [(-2.6, False), (-2.7, True), (10.99, False), (11.01, True), (-1e4, True)])
def test_k3_saturates_below_minus_2_61_and_above_11(d, saturated):
    assert kl_saturated(torch.tensor([d - 1.0]), torch.tensor([-1.0]), "k3").tolist() == [saturated]


@pytest.mark.parametrize("form", ["k1", "k2", "abs", "mse", "k3+", "low_var_kl+"])
def test_forms_without_clamps_in_their_gradient_have_no_saturation(form):
    assert kl_saturated(torch.tensor([-50.0]), torch.zeros(1), form) is None


@pytest.mark.parametrize(
    ("current_kl", "expected"), [(0.1, 0.001), (0.2, 0.00102048), (0.05, 0.00097952), (5.0, 0.00102048)]
)
def test_the_adaptive_coefficient_follows_the_target(current_kl, expected):
    """Target 0.1, horizon 10000, 1024 trajectories; at the target nothing changes."""
    controller = KLController(0.001, target=0.1, horizon=10000)
    controller.update(current_kl, trajectories=1024)
    assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_the_adaptive_coefficient_moves_with_the_error_between_the_clips():
    controller = KLController(0.001, target=0.1, horizon=1000)
    controller.update(0.11, trajectories=100)
    assert controller.coefficient == pytest.approx(0.001 * (1 + 0.1 * 100 / 1000))


def test_a_fixed_coefficient_stays():
    controller = KLController(0.001)
    controller.update(5.0, trajectories=1024)
    assert controller.coefficient == 0.001


def test_a_run_that_goes_on_with_another_fixed_coefficient_takes_it():
    controller = KLController(0.5)
    controller.load_state_dict(KLController(0.001).state_dict())
    assert controller.coefficient == 0.5


def test_a_controller_is_put_back():
    controller = KLController(0.1, target=0.05, horizon=100)
    before = controller.state_dict()
    controller.update(1.0, 10)
    assert controller.coefficient != 0.1
    controller.load_state_dict(before)
    assert controller.coefficient == 0.1
