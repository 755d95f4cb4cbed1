"""What holds for every policy loss."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.actor_loss import ActorTerms, actor_loss
from mppo.algorithm.statistics import add_up
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.policy_cases import (
    CASES,
    counts_of,
    evaluate,
    loss_of,
    losses_and_gradient,
    mini_batches,
    policy_inputs,
    prepared,
    tokens,
)
from tests.unit.samples import assignments, held_by, normals, segments_of, vectors

pytestmark = [pytest.mark.unit, pytest.mark.parametrize("case", CASES)]

few = settings(max_examples=8)


def with_nothing_chosen(x):
    return replace(x, prepared={"covers": torch.zeros_like(x.mask)})


@few
@given(mini_batches(), normals(1))
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient_nor_statistics(case, mini_batch, garbage):
    (batch, log_probs), loss = mini_batch, loss_of(case)
    names = ("old_log_probs", "advantages", "rollout_is_weights")
    hidden = {name: torch.where(batch.mask, batch[name], 1e6 * garbage) for name in names}
    shown = evaluate(loss, prepared(loss, batch, log_probs), log_probs)

    log_probs = torch.where(batch.mask, log_probs, 1e6)
    covered = evaluate(loss, prepared(loss, batch.with_fields(**hidden), log_probs), log_probs)
    assert (covered.loss, covered.numbers) == (shown.loss, shown.numbers)
    assert torch.equal(covered.gradient, shown.gradient)
    assert (covered.gradient[~batch.mask] == 0).all()


@few
@given(mini_batches())
def test_not_a_number_behind_the_mask_stays_there(case, mini_batch):
    """Outside the mask the gradient is then NaN as well; training hides it in the log-probs that it hands in."""
    (batch, log_probs), loss = mini_batch, loss_of(case)
    names = ("old_log_probs", "advantages", "rollout_is_weights")
    hidden = {name: torch.where(batch.mask, batch[name], torch.nan) for name in names}
    shown = evaluate(loss, prepared(loss, batch, log_probs), log_probs)

    log_probs = torch.where(batch.mask, log_probs, torch.nan)
    covered = evaluate(loss, prepared(loss, batch.with_fields(**hidden), log_probs), log_probs)
    assert (covered.loss, covered.numbers) == (shown.loss, shown.numbers)
    assert torch.equal(covered.gradient[batch.mask], shown.gradient[batch.mask])


@few
@given(mini_batches(), st.data())
def test_trajectories_may_come_in_any_order(case, mini_batch, data):
    (batch, log_probs), loss = mini_batch, loss_of(case)
    batch = prepared(loss, batch, log_probs)
    shuffled = batch.select(data.draw(st.permutations(range(len(batch.lengths)))))
    here, there = evaluate(loss, batch, log_probs), evaluate(loss, shuffled, log_probs[shuffled.origin])
    assert there.loss == pytest.approx(here.loss)
    assert there.numbers == pytest.approx(here.numbers)
    torch.testing.assert_close(batch.gather_back([shuffled.origin], [there.gradient]), here.gradient)


@few
@given(mini_batches(), st.data())
def test_the_cut_over_ranks_and_micro_batches_changes_nothing(case, mini_batch, data):
    """What a loss prepares is from all ranks; a rank may hold nothing, and micro-batches are padded."""
    (batch, log_probs), loss = mini_batch, loss_of(case)
    counts = counts_of(batch)
    whole = evaluate(loss, prepared(loss, batch, log_probs), log_probs)

    def on_rank(part, reduction):
        mine = log_probs[part.origin]
        rows, part = range(len(part.lengths)), prepared(loss, part, mine, part.origin, reduction=reduction)
        pieces = [part.select(rows[start::2]).pad_to_multiple(4) for start in (0, 1)]
        padded = torch.cat([mine, torch.zeros(1)])
        results = [evaluate(loss, piece, padded[piece.origin], counts) for piece in pieces]
        gradient = part.gather_back([piece.origin for piece in pieces], [result.gradient for result in results])
        return part.origin, gradient, results

    held = held_by(data.draw(assignments(len(batch.lengths))))
    origins, gradients, results = zip(*on_simulated_ranks([batch.select(rows) for rows in held], on_rank), strict=True)
    results = [result for of_rank in results for result in of_rank]
    torch.testing.assert_close(batch.gather_back(origins, gradients), whole.gradient)
    assert sum(result.loss for result in results) == pytest.approx(whole.loss)
    total = add_up([result.statistics for result in results])
    assert {name: ratio.value for name, ratio in total.items()} == pytest.approx(whole.numbers)


class Held:
    """`stop_gradient` that keeps what goes through it, to give the same again when the loss is evaluated once more."""

    def __init__(self):
        self.values, self.next = [], None

    def __call__(self, x):
        if self.next is None:
            self.values.append(x.detach())
            return self.values[-1]
        return next(self.next)

    def again(self):
        self.next = iter(self.values)
        return self


@few
@given(mini_batches(max_trajectories=3))
def test_the_gradient_is_that_of_finite_differences(case, mini_batch):
    """With what goes through `stop_gradient` held fixed."""
    (batch, log_probs), loss, held, step = mini_batch, loss_of(case), Held(), 1e-6
    batch = prepared(loss, batch, log_probs)
    gradient = evaluate(loss, batch, log_probs, stop_gradient=held).gradient

    def change(at):
        moved = [log_probs + sign * step * torch.eye(len(log_probs), dtype=torch.double)[at] for sign in (1, -1)]
        up, down = (evaluate(loss, batch, x, stop_gradient=held.again()).loss for x in moved)
        return (up - down) / (2 * step)

    assert gradient.tolist() == pytest.approx([change(at) for at in range(len(log_probs))], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_it_is_finite_at_extreme_log_ratios(case, advantage, dtype):
    loss = loss_of(case)
    near, far = torch.tensor([-0.5, -1e-9, -0.5], dtype=dtype), torch.tensor([-1000.5, -1000.5, -0.5], dtype=dtype)
    for now, before in ((near, far), (far, near)):
        x = tokens([0.0] * 3, [advantage] * 3)
        now = now.clone().requires_grad_()
        x = replace(x, log_probs=now, old_log_probs=before, advantages=x.advantages.to(dtype))
        x = replace(x, prepared={"covers": torch.tensor([True, False, True])})
        result = loss(x)
        (gradient,) = torch.autograd.grad(result.loss.sum(), now)
        assert result.loss.isfinite().all()
        assert gradient.isfinite().all()
        assert all(math.isfinite(s.reduce(x.mask).value) for s in result.statistics.values())


@few
@given(vectors(3), normals(6))
def test_on_policy_it_is_the_policy_gradient(case, advantages, log_probs):
    """One advantage per trajectory: better than the baseline is pushed up, worse is pushed down, and by that much."""
    segments = segments_of(1, 2, 3)
    x = tokens([0.0] * 6, segments.expand(advantages).tolist())
    x = replace(x, log_probs=-log_probs.abs().requires_grad_(), old_log_probs=-log_probs.abs(), segments=segments)
    _, gradient = losses_and_gradient(loss_of(case), with_nothing_chosen(x))
    assert gradient == pytest.approx((-x.advantages).tolist())


@few
@given(mini_batches())
def test_importance_weights_multiply_the_loss_and_none_of_its_statistics(case, mini_batch):
    (batch, log_probs), loss = mini_batch, loss_of(case)
    x = policy_inputs(prepared(loss, batch, log_probs), log_probs)
    token_weights = torch.ones_like(log_probs)
    plain, _ = actor_loss(replace(x, rollout_is_weights=None), token_weights, ActorTerms(loss))
    weighted, _ = actor_loss(x, token_weights, ActorTerms(loss))
    if case == "geo_mean":  # one weight per trajectory: the geometric mean
        expected = plain * x.segments.expand(x.segments.mean(x.rollout_is_weights.log(), x.mask).exp())
    else:
        expected = plain * x.rollout_is_weights
    torch.testing.assert_close(weighted[x.mask], expected[x.mask])
    with_weights, without = loss(x).statistics, loss(replace(x, rollout_is_weights=None)).statistics
    assert {name: s.reduce(x.mask).value for name, s in with_weights.items()} == {
        name: s.reduce(x.mask).value for name, s in without.items()
    }


def test_the_distance_to_the_anchor_is_reported(case):
    """A ratio of 1.5 and one of e^-25, of which the second is beyond the clamp."""
    x = with_nothing_chosen(tokens([math.log(1.5), -25.0], [1.0, 1.0]))
    reported = {name: s.reduce(x.mask).value for name, s in loss_of(case)(x).statistics.items()}
    assert reported["ratio_deviation"] == pytest.approx((0.5 + 1.0) / 2)
    saturated = 0.0 if case == "gspo" else 0.5  # which clamps the ratio of the whole sequence, at e^10
    assert reported["log_ratio_saturated"] == saturated
