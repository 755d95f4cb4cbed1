import math
import pickle
from statistics import fmean, pstdev, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.statistics import (
    TokenStatistic,
    add_up,
    effective_sample_size,
    largest,
    mean,
    mean_and_extremes,
    normaliser,
    numbers,
    prefixed,
    reduced,
    smallest,
    std,
    total,
)
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.samples import assignments, held_by, normals, packed_batches

pytestmark = pytest.mark.unit


def everything(x, over):
    return {
        "mean": mean(x, over),
        "std": std(x, over, unbiased=False),
        "unbiased": std(x, over, unbiased=True),
        "left": effective_sample_size(x.abs(), over),
        "largest": largest(x, over),
        "smallest": smallest(x, over),
    }


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


def test_a_token_statistic_is_over_the_mask_of_the_loss():
    statistic = TokenStatistic(torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert statistic.reduce(torch.tensor([True, True, False, True])).value == pytest.approx(2 / 3)


def test_a_token_statistic_may_bring_a_denominator_of_its_own():
    statistic = TokenStatistic(torch.tensor([1.0, 3.0, 9.0]), over=torch.tensor([True, True, False]))
    assert statistic.reduce(torch.ones(3, dtype=torch.bool)).value == 2.0


def test_statistics_carry_no_gradient():
    x = torch.ones(2, requires_grad=True)
    found = [*everything(x, torch.ones(2)).values(), total(x)]
    assert not any(
        moment.requires_grad for s in found for moment in vars(s).values() if isinstance(moment, torch.Tensor)
    )


@given(packed_batches(), st.data())
def test_each_number_is_its_definition_over_what_the_mask_selects(batch, data):
    x = data.draw(normals(len(batch)))
    hidden = torch.where(batch.mask, x, torch.nan)
    assert numbers(everything(hidden, batch.mask)) == pytest.approx(expected(x[batch.mask].tolist()), abs=1e-12)


@given(packed_batches(), st.data())
def test_every_rank_is_told_the_numbers_of_the_whole(batch, data):
    x = data.draw(normals(len(batch)))
    held = held_by(data.draw(assignments(len(batch))))
    ranks = on_simulated_ranks(
        held, lambda mine, reduction: numbers(reduced(everything(x[mine], batch.mask[mine]), reduction))
    )
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0] == pytest.approx(expected(x[batch.mask].tolist()), abs=1e-12)


@given(packed_batches(), st.data())
def test_pieces_add_up_to_the_whole(batch, data):
    x = data.draw(normals(len(batch)))
    pieces = [everything(x[held], batch.mask[held]) for held in held_by(data.draw(assignments(len(batch))))]
    assert numbers(add_up(pieces)) == pytest.approx(expected(x[batch.mask].tolist()), abs=1e-12)


@given(normals(12), st.data())
def test_a_deviation_survives_a_mean_that_is_far_larger(x, data):
    """By pieces and over ranks, with a mean of 1e8 deviations; a difference of moments would have nothing left."""
    shifted, over = x + 1e8, torch.ones(12)
    held = held_by(data.draw(assignments(12)))
    spread = pstdev((shifted - 1e8).tolist())
    pieces = [std(shifted[mine], over[mine], unbiased=False) for mine in held]
    assert (pieces[0] + pieces[1] + pieces[2]).value == pytest.approx(spread, rel=1e-6)
    ranks = on_simulated_ranks(pieces, lambda piece, reduction: piece.reduced(reduction).value)
    assert ranks == pytest.approx([spread] * 3, rel=1e-6)


@pytest.mark.parametrize("constant", [1.0, 0.3, 2.3, -1e6, 1e-6])
def test_equal_numbers_do_not_deviate(constant):
    value = numbers(everything(torch.full((7,), constant, dtype=torch.double), torch.ones(7)))
    assert value["std"] <= 1e-15 * abs(constant)
    assert value["left"] == pytest.approx(1.0)


def test_over_nothing_every_number_is_zero():
    assert set(numbers(everything(torch.ones(3), torch.zeros(3))).values()) == {0.0}
    assert set(numbers(everything(torch.ones(0), torch.ones(0))).values()) == {0.0}


def test_a_total_is_a_plain_sum():
    both = total(torch.tensor([1.0, 2.0])) + total(torch.tensor([4.0]))
    assert (both.value, both.is_total, mean(torch.ones(1), torch.ones(1)).is_total) == (7.0, True, False)


def test_a_name_that_only_some_pieces_have_counts_those():
    one, two = total(torch.tensor(1.0)), total(torch.tensor(2.0))
    assert numbers(add_up([{"a": one}, {"a": two, "b": two}, {}])) == {"a": 3.0, "b": 2.0}


def test_vectors_of_different_length_and_type_are_reduced_together():
    statistics = {
        "of tokens": mean(torch.tensor([1.0, 2.0, 6.0]), torch.ones(3)),
        "of trajectories": mean(torch.tensor([True, False]), torch.tensor([True, True])),
        "of all": largest(torch.tensor([3, 1]), torch.ones(2)),
    }
    assert numbers(reduced(statistics, WHOLE)) == {"of tokens": 3.0, "of trajectories": 0.5, "of all": 3.0}


def test_nothing_calls_for_no_reduction():
    assert reduced({}, None) == {}


def test_a_rank_waits_for_the_others_once():
    """Whatever the metrics: counts, sums, deviations and extremes travel together."""
    calls = []

    def counted(x):
        calls.append(tuple(x.shape))
        return torch.stack([x, x])

    found = reduced(everything(torch.tensor([1.0, 3.0]), torch.ones(2)), Reduction(stack=counted))
    assert calls == [(6 * 2 + 3 + 2,)]
    assert numbers(found)["mean"] == 2.0 and found["mean"].count == 4


def test_a_number_that_is_not_finite_shows():
    value = numbers(everything(torch.tensor([1.0, math.nan]), torch.ones(2)))
    assert math.isnan(value["mean"]) and math.isnan(value["std"])


def test_statistics_travel_between_processes():
    sent = pickle.loads(pickle.dumps(total(torch.tensor([1.0, 2.0]))))
    assert (sent.value, sent.is_total) == (3.0, True)


@pytest.mark.parametrize(("x", "expected"), [([0.5, 1.5, 4.0], 2.0), ([0.0, 0.0], 1.0), ([1e-9], 1.0), ([], 1.0)])
def test_a_mean_that_is_too_small_to_divide_by_normalises_by_1(x, expected):
    assert normaliser(torch.tensor(x), torch.ones(len(x))).value == expected


def test_mean_and_extremes_stand_under_one_name():
    found = numbers(prefixed("val/", mean_and_extremes("reward", torch.tensor([1.0, 3.0, 8.0]), torch.ones(3))))
    assert found == {"val/reward/mean": 4.0, "val/reward/min": 1.0, "val/reward/max": 8.0}
