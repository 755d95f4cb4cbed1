"""Losses over slices of trajectories, as context-parallel ranks hold them: `Segments.combine` adds them up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.aggregation import AGGREGATIONS, token_weights
from mppo.algorithm.segments import Segments
from mppo.algorithm.statistics import add_up
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.policy_cases import CASES, counts_of, evaluate, loss_of, mini_batches, prepared
from tests.unit.samples import assignments, normals

pytestmark = pytest.mark.unit


class AllReduce(torch.autograd.Function):
    """The sum over all ranks, and the sum of their gradients."""

    @staticmethod
    def forward(ctx, x, reduction):
        ctx.reduction = reduction
        return reduction.sum(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.reduction.sum(gradient), None


def slice_of(batch, positions, reduction):
    """The segments of a rank that has these positions."""
    whole = batch.segments
    return Segments(whole.ids[positions], whole.count, lambda x: AllReduce.apply(x, reduction))


class Slice:
    """A batch at some of its positions, for `evaluate`."""

    def __init__(self, batch, positions, reduction):
        self.segments = slice_of(batch, positions, reduction)
        self.mask = batch.mask[positions]
        self.fields = {name: x[positions] for name, x in batch.fields.items()}
        self.prepared = {name: x[positions] for name, x in batch.prepared.items()}

    def __getitem__(self, name):
        return self.fields[name]

    def get(self, name):
        return self.fields.get(name)


def positions_of(assignment):
    return [(torch.tensor(assignment) == rank).nonzero().squeeze(-1) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8)
@given(mini_batches(), st.data())
def test_loss_gradient_and_statistics_of_two_slices_are_those_of_the_whole(case, mini_batch, data):
    """However the positions of a trajectory are spread; a rank may hold none of it."""
    (batch, log_probs), loss = mini_batch, loss_of(case)
    batch = prepared(loss, batch, log_probs)
    whole, counts = evaluate(loss, batch, log_probs), counts_of(batch)

    def on_rank(positions, reduction):
        return evaluate(loss, Slice(batch, positions, reduction), log_probs[positions], counts)

    held = positions_of(data.draw(assignments(len(batch), 2)))
    slices = on_simulated_ranks(held, on_rank)
    assert sum(piece.loss for piece in slices) == pytest.approx(whole.loss)
    gradient = batch.gather_back(held, [piece.gradient for piece in slices])
    torch.testing.assert_close(gradient, whole.gradient)
    total = add_up([piece.statistics for piece in slices])
    assert {name: ratio.value for name, ratio in total.items()} == pytest.approx(whole.numbers)


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
@settings(max_examples=8)
@given(mini_batches(), st.data())
def test_token_weights_of_a_slice_are_those_of_the_whole(mode, mini_batch, data):
    batch, _ = mini_batch
    counts = counts_of(batch)

    def on_rank(positions, reduction):
        return token_weights(mode, batch.mask[positions], slice_of(batch, positions, reduction), counts, 7.0)

    held = positions_of(data.draw(assignments(len(batch), 2)))
    weights = batch.gather_back(held, on_simulated_ranks(held, on_rank))
    torch.testing.assert_close(weights, token_weights(mode, batch.mask, batch.segments, counts, 7.0))


@settings(max_examples=8)
@given(mini_batches(), st.data())
def test_a_sum_over_slices_has_the_gradient_of_the_whole(mini_batch, data):
    """Of a function of the sums that every rank reads with weights of its own."""
    batch, x = mini_batch
    readers = data.draw(normals(2, len(batch.lengths)))
    leaf = x.clone().requires_grad_()
    (readers.sum(0) * batch.segments.sum(leaf, batch.mask).sin()).sum().backward()

    def on_rank(part, reduction):
        rank, positions = part
        mine = x[positions].clone().requires_grad_()
        sums = slice_of(batch, positions, reduction).sum(mine, batch.mask[positions])
        (readers[rank] * sums.sin()).sum().backward()
        return mine.grad

    held = positions_of(data.draw(assignments(len(batch), 2)))
    gradient = batch.gather_back(held, on_simulated_ranks(list(enumerate(held)), on_rank))
    torch.testing.assert_close(gradient, leaf.grad)


@settings(max_examples=8)
@given(mini_batches(), st.data())
def test_lengths_and_means_over_slices_are_those_of_the_whole(mini_batch, data):
    batch, x = mini_batch

    def on_rank(positions, reduction):
        segments = slice_of(batch, positions, reduction)
        return segments.lengths(batch.mask[positions]), segments.mean(x[positions], batch.mask[positions])

    for lengths, means in on_simulated_ranks(positions_of(data.draw(assignments(len(batch), 2))), on_rank):
        assert torch.equal(lengths, batch.segments.lengths(batch.mask))
        torch.testing.assert_close(means, batch.segments.mean(x, batch.mask))


def test_the_largest_of_a_trajectory_that_is_cut_is_refused():
    cut = Segments(torch.zeros(2, dtype=torch.long), 1, combine=lambda x: x)
    with pytest.raises(ValueError, match="needs whole trajectories"):
        cut.max(torch.ones(2), torch.ones(2, dtype=torch.bool))
