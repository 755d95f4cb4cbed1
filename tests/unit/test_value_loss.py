import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.value_loss import clipped_value_loss
from tests.unit.samples import masked_sum, packed_batches, vectors

pytestmark = pytest.mark.unit


def loss_and_gradient(value, old_value, target, cliprange):
    values = torch.tensor([value], dtype=torch.double, requires_grad=True)
    old_values, returns = (torch.tensor([x], dtype=torch.double) for x in (old_value, target))
    loss, statistics = clipped_value_loss(values, old_values, returns, cliprange)
    loss.sum().backward()
    return loss.item(), values.grad.item(), statistics["vf_clipfrac"].value.item()


def test_a_value_that_moved_too_far_towards_its_target():
    """Section 8.1: 0.4 -> 0.9 clipped to 0.6, errors 0.01 and 0.16; the larger counts, without a gradient."""
    assert loss_and_gradient(0.9, 0.4, 1.0, 0.2) == pytest.approx((0.08, 0.0, 1.0))


def test_a_value_that_moved_too_far_past_its_target_is_pulled_back():
    assert loss_and_gradient(0.9, 0.4, 0.0, 0.2) == pytest.approx((0.5 * 0.81, 0.9, 0.0))


def test_within_the_clip_range_it_is_half_the_squared_error():
    assert loss_and_gradient(0.5, 0.4, 1.0, 0.2) == pytest.approx((0.125, -0.5, 0.0))


@given(vectors(5), vectors(5), vectors(5), st.floats(0.01, 2))
def test_clipping_never_lowers_the_loss(values, old_values, returns, cliprange):
    loss, _ = clipped_value_loss(values, old_values, returns, cliprange)
    assert (loss >= 0.5 * (values - returns).square()).all()


@given(st.data())
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient_nor_statistics(data):
    batch = data.draw(packed_batches())
    shown, hidden = data.draw(vectors(2, 3, len(batch)))

    def evaluate(values, old_values, returns):
        values = values.clone().requires_grad_()
        loss, statistics = clipped_value_loss(values, old_values, returns, 0.5)
        total = masked_sum(loss, batch.mask, torch.ones(len(batch)))
        total.backward()
        return total.item(), values.grad.tolist(), {name: s.reduce(batch.mask).value for name, s in statistics.items()}

    assert evaluate(*torch.where(batch.mask, shown, 1e6 * hidden)) == evaluate(*shown)
