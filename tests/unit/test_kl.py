import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.kl import KL_FORMS, KLController, kl_penalty
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
    """Section 7.3; k3 is clipped at 10, where its gradient is 0."""
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


@pytest.mark.parametrize("form", ["k4", "k3++", "full"])
def test_a_form_that_samples_cannot_give_is_named(form):
    with pytest.raises(ConfigError, match=f"unknown KL form '{re.escape(form.removesuffix('+'))}'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), form)


@pytest.mark.parametrize(
    ("current_kl", "expected"), [(0.1, 0.001), (0.2, 0.00102048), (0.05, 0.00097952), (5.0, 0.00102048)]
)
def test_the_adaptive_coefficient_follows_the_target(current_kl, expected):
    """Section 7.1: target 0.1, horizon 10000, 1024 trajectories; at the target nothing changes."""
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
