import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.aggregation import AGGREGATIONS, BatchCounts, token_weights
from mppo.batch.batch_plan import MicroBatchLimit, plan_micro_batches
from mppo.errors import ConfigError
from tests.unit.samples import masked_sum, packed_batches, segments_of, vectors

pytestmark = pytest.mark.unit

MODES = AGGREGATIONS.names()


def counts_of(mask, segments):
    return BatchCounts(int(mask.sum()), int((segments.lengths(mask) > 0).sum()))


def weights_of(mode, mask, segments, norm=16.0):
    return token_weights(mode, mask, segments, counts_of(mask, segments), norm)


@pytest.mark.parametrize(
    ("mode", "shares"),
    [
        ("token-mean", [2 / 8, 6 / 8]),
        ("token-sum", [2, 6]),
        ("seq-mean-token-sum", [2 / 2, 6 / 2]),
        ("seq-mean-token-mean", [1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", [2 / 2 / 16, 6 / 2 / 16]),
    ],
)
def test_what_two_and_six_tokens_contribute(mode, shares):
    """A has 2 tokens, B has 6, every token loss is 1."""
    segments, mask = segments_of(2, 6), torch.ones(8, dtype=torch.bool)
    assert segments.sum(weights_of(mode, mask, segments), mask).tolist() == pytest.approx(shares)


@pytest.mark.parametrize("mode", MODES)
def test_a_trajectory_without_tokens_does_not_count(mode):
    mask = torch.tensor([True, True] + [False] * 3 + [True] * 6)
    with_empty = weights_of(mode, mask, segments_of(2, 3, 6))
    without = weights_of(mode, mask[mask], segments_of(2, 6))
    torch.testing.assert_close(with_empty[mask], without, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_without_tokens_weighs_nothing(mode):
    mask = torch.zeros(5, dtype=torch.bool)
    assert weights_of(mode, mask, segments_of(2, 3)).tolist() == [0.0] * 5


@pytest.mark.parametrize("mode", MODES)
@given(st.data())
def test_pieces_add_up_to_the_whole(mode, data):
    """Whatever the micro-batches and their padding, under the counts of the whole mini-batch."""
    batch = data.draw(packed_batches())
    loss = data.draw(vectors(len(batch)))
    budget = data.draw(st.integers(max(batch.lengths), len(batch)))
    counts = counts_of(batch.mask, batch.segments)

    def share(piece, loss):
        return masked_sum(loss, piece.mask, token_weights(mode, piece.mask, piece.segments, counts, norm=7.0))

    (plan,) = plan_micro_batches(
        [list(range(len(batch.lengths)))], batch.lengths, MicroBatchLimit(tokens=budget).of_replica()
    )
    pieces = [batch.select(micro_batch).pad_to_multiple(4) for micro_batch in plan]
    summed = sum(share(piece, loss[piece.origin]) for piece in pieces)
    assert summed.item() == pytest.approx(share(batch, loss).item())


@pytest.mark.parametrize("mode", MODES)
@given(packed_batches())
def test_only_masked_positions_have_weight(mode, batch):
    weights = weights_of(mode, batch.mask, batch.segments)
    assert torch.equal(weights > 0, batch.mask)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@given(packed_batches())
def test_weights_of_a_mean_sum_to_one(mode, batch):
    total = weights_of(mode, batch.mask, batch.segments).sum().item()
    assert total == pytest.approx(1.0 if batch.mask.any() else 0.0)


def test_an_unknown_mode_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="'token_mean'.*did you mean 'token-mean'"):
        weights_of("token_mean", torch.ones(1), segments_of(1))
