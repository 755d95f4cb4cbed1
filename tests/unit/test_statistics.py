import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.statistics import Ratio, TokenStatistic, add_up
from tests.unit.samples import packed_batches, vectors

pytestmark = pytest.mark.unit


def test_a_mean_is_over_the_mask_of_the_loss():
    statistic = TokenStatistic(torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert statistic.reduce(torch.tensor([True, True, False, True])).value == pytest.approx(2 / 3)


def test_a_statistic_may_bring_a_denominator_of_its_own():
    statistic = TokenStatistic(torch.tensor([1.0, 3.0, 9.0]), over=torch.tensor([True, True, False]))
    assert statistic.reduce(torch.ones(3, dtype=torch.bool)).value == 2.0


def test_what_the_mask_hides_does_not_count():
    value = torch.tensor([2.0, float("nan"), float("inf")])
    assert Ratio.mean(value, torch.tensor([True, False, False])).value == 2.0


def test_statistics_carry_no_gradient():
    ratio = TokenStatistic(torch.ones(2, requires_grad=True)).reduce(torch.ones(2, dtype=torch.bool))
    assert not ratio.numerator.requires_grad


def test_a_total_is_a_plain_sum():
    assert (Ratio.total(torch.tensor([1.0, 2.0])) + Ratio.total(torch.tensor([4.0]))).value == 7.0


def test_a_mean_over_nothing_is_zero():
    assert Ratio.mean(torch.ones(2), torch.zeros(2, dtype=torch.bool)).value == 0.0


def test_metrics_that_only_some_pieces_report_are_kept():
    one, two = Ratio.total(torch.tensor(1.0)), Ratio.total(torch.tensor(2.0))
    assert {name: r.value for name, r in add_up([{"a": one}, {"a": two, "b": two}, {}]).items()} == {"a": 3.0, "b": 2.0}


@given(st.data())
def test_a_mean_over_unequal_pieces_is_the_mean_over_the_whole(data):
    batch = data.draw(packed_batches())
    value = data.draw(vectors(len(batch)))
    pieces = [batch.select([i]) for i in range(len(batch.lengths))]
    summed = add_up([{"m": Ratio.mean(value[piece.origin], piece.mask)} for piece in pieces])
    assert summed["m"].value == pytest.approx(Ratio.mean(value, batch.mask).value)
