import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.diagnostics import explained_variance
from mppo.algorithm.reduction import WHOLE
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.samples import packed_batches, vectors

pytestmark = pytest.mark.unit

ALL = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 6.0], 1.0),
        ([6.0, 7.0, 8.0, 11.0], 1.0),  # a constant error is no variance
        ([0.0] * 4, 0.0),
        ([0.5, 1.0, 1.5, 3.0], 0.75),
        ([-1.0, -2.0, -3.0, -6.0], -3.0),
    ],
)
def test_the_share_of_the_variance_that_the_critic_foresees(values, expected):
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(torch.tensor(values), returns, ALL, WHOLE) == pytest.approx(expected)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1.0, 1e6 / 3])
def test_it_is_zero_when_the_returns_do_not_vary(constant):
    returns = torch.full((3,), constant, dtype=torch.double)
    assert explained_variance(torch.tensor([0.3, 0.1, 0.7]), returns, ALL[:3], WHOLE) == 0.0


def test_it_is_zero_over_nothing():
    assert explained_variance(torch.ones(4), torch.ones(4), ~ALL, WHOLE) == 0.0


@given(st.data())
def test_parts_agree_with_the_whole_and_hidden_values_do_not_count(data):
    batch = data.draw(packed_batches())
    values, returns = data.draw(vectors(2, len(batch))) + 0.03 * torch.arange(len(batch))
    pieces = [batch.select(range(start, len(batch.lengths), 2)) for start in (0, 1)]
    hidden = torch.where(batch.mask, values, torch.nan)

    def on_part(piece, reduction):
        return explained_variance(hidden[piece.origin], returns[piece.origin], piece.mask, reduction)

    whole = explained_variance(values, returns, batch.mask, WHOLE)
    assert on_simulated_ranks(pieces, on_part) == pytest.approx([whole] * 2, rel=1e-6, abs=1e-6)
