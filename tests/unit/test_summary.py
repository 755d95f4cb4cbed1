import math
from statistics import fmean, pstdev, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.reduction import WHOLE
from mppo.algorithm.summary import Summary
from tests.unit.samples import assignments, held_by, normals, over_parts, packed_batches

pytestmark = pytest.mark.unit


def collected(x, over):
    summary = Summary()
    summary.mean("mean", x, over)
    summary.std("std", x, over, unbiased=False)
    summary.std("unbiased", x, over, unbiased=True)
    summary.effective_sample_size("left", x.abs(), over)
    summary.largest("largest", x, over)
    summary.smallest("smallest", x, over)
    return summary


def summarised(x, over, reduction=WHOLE):
    return collected(x, over).finish(reduction).numbers()


def expected(x):
    """Of a list, by the definitions."""
    squares = sum(value * value for value in x)
    return {
        "mean": fmean(x) if x else 0.0,
        "std": pstdev(x) if x else 0.0,
        "unbiased": stdev(x) if len(x) > 1 else 0.0,
        "left": sum(map(abs, x)) ** 2 / (len(x) * squares) if squares else 0.0,
        "largest": max(x, default=0.0),
        "smallest": min(x, default=0.0),
    }


@given(packed_batches(), st.data())
def test_each_number_is_its_definition_over_what_the_mask_selects(batch, data):
    x = data.draw(normals(len(batch)))
    hidden = torch.where(batch.mask, x, torch.nan)
    assert summarised(hidden, batch.mask) == pytest.approx(expected(x[batch.mask].tolist()), abs=1e-7)


@given(packed_batches(), st.data())
def test_every_part_is_told_the_numbers_of_the_whole(batch, data):
    x = data.draw(normals(len(batch)))
    held = held_by(data.draw(assignments(len(batch))))
    parts = over_parts(held, lambda places, reduction: summarised(x[places], batch.mask[places], reduction))
    assert parts[0] == parts[1] == parts[2]
    assert parts[0] == pytest.approx(expected(x[batch.mask].tolist()), abs=1e-7)


def test_over_nothing_every_number_is_zero():
    assert set(summarised(torch.ones(3), torch.zeros(3)).values()) == {0.0}
    assert set(summarised(torch.ones(0), torch.ones(0)).values()) == {0.0}


def test_vectors_of_different_length_and_type_go_together():
    summary = Summary()
    summary.mean("of tokens", torch.tensor([1.0, 2.0, 6.0]), torch.ones(3))
    summary.mean("of trajectories", torch.tensor([True, False]), torch.tensor([True, True]))
    summary.largest("of all", torch.tensor([3, 1]), torch.ones(2))
    assert summary.finish(WHOLE).numbers() == {"of tokens": 3.0, "of trajectories": 0.5, "of all": 3.0}


def test_a_summary_of_nothing_calls_for_no_reduction():
    assert Summary().finish(None).numbers() == {}


@pytest.mark.parametrize("constant", [1.0, 0.3, 2.3, -1e6, 1e-6])
def test_equal_numbers_hardly_deviate(constant):
    """Up to the rounding of a difference of squares."""
    value = summarised(torch.full((7,), constant, dtype=torch.double), torch.ones(7))
    assert value["std"] <= 1e-7 * abs(constant)
    assert value["left"] == pytest.approx(1.0)


def test_the_reduction_is_called_once_for_sums_and_once_for_extremes():
    """Whatever the number of metrics, a rank waits for the others twice."""
    calls = []

    def counted(x):
        calls.append(len(x))
        return x

    summarised(torch.ones(3), torch.ones(3), type(WHOLE)(sum=counted, max=counted))
    assert calls == [2 + 3 + 3 + 3, 2]


def test_a_number_that_is_not_finite_shows_in_the_mean():
    assert math.isnan(summarised(torch.tensor([1.0, math.nan]), torch.ones(2))["mean"])


@given(packed_batches(), st.data())
def test_numbers_of_mini_batches_add_up_to_those_of_all(batch, data):
    x = data.draw(normals(len(batch)))
    first, *others = held_by(data.draw(assignments(len(batch))))
    total = collected(x[first], batch.mask[first]).finish(WHOLE)
    for places in others:
        total += collected(x[places], batch.mask[places]).finish(WHOLE)
    assert total.numbers() == pytest.approx(expected(x[batch.mask].tolist()), abs=1e-7)


def test_numbers_under_other_names_stand_side_by_side():
    one, other = Summary(), Summary()
    one.mean("mean", torch.tensor([1.0, 3.0]), torch.ones(2))
    other.largest("largest", torch.tensor([1.0, 3.0]), torch.ones(2))
    both = one.finish(WHOLE) | other.finish(WHOLE)
    assert both.numbers("corr/") == {"corr/mean": 2.0, "corr/largest": 3.0}


@pytest.mark.parametrize(("x", "normaliser"), [([0.5, 1.5, 4.0], 2.0), ([0.0, 0.0], 1.0), ([1e-9], 1.0), ([], 1.0)])
def test_a_mean_that_is_too_small_to_divide_by_normalises_by_1(x, normaliser):
    summary = Summary()
    summary.normaliser("n", torch.tensor(x), torch.ones(len(x)))
    assert summary.finish(WHOLE).numbers() == {"n": normaliser}
