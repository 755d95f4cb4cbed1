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


def summarised(x, over, reduction=WHOLE):
    summary = Summary()
    summary.mean("mean", x, over)
    summary.std("std", x, over, unbiased=False)
    summary.std("unbiased", x, over, unbiased=True)
    summary.effective_sample_size("left", x.abs(), over)
    summary.largest("largest", x, over)
    summary.smallest("smallest", x, over)
    return summary.finish(reduction)


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
    assert summary.finish(WHOLE) == {"of tokens": 3.0, "of trajectories": 0.5, "of all": 3.0}


def test_a_summary_of_nothing_calls_for_no_reduction():
    assert Summary().finish(None) == {}


@pytest.mark.parametrize("constant", [1.0, 0.1, -1e6, 1e-6])
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
