"""Length penalty, running normalisation, clip, and masking of cut answers."""

import json
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.reward_shaping import (
    OutcomeShaping,
    RunningMoments,
    add_at_last_action,
    overlong_penalty,
    shape_outcomes,
    shaping_metrics,
    without_trajectories,
)
from tests.unit.samples import segments_of

pytestmark = pytest.mark.unit

NUMBERS = st.floats(-10, 10)


@pytest.mark.parametrize(("response", "penalty"), [(0, 0), (60, 0), (80, 0), (85, -0.5), (90, -1), (100, -2)])
def test_the_penalty_grows_linearly_over_the_last_tokens(response, penalty):
    """DAPO: maximum 100, buffer 20, factor 2."""
    assert overlong_penalty(response, OutcomeShaping(100, overlong_buffer=20, penalty_factor=2.0)) == pytest.approx(
        penalty
    )


def test_without_a_buffer_length_costs_nothing():
    assert overlong_penalty(100, OutcomeShaping(100)) == 0.0


@given(st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=6))
def test_running_moments_are_those_of_everything_so_far(batches):
    moments, everything = RunningMoments(), []
    for batch in batches:
        moments.update(batch)
        everything += batch
    if everything:
        assert moments.mean == pytest.approx(statistics.mean(everything), abs=1e-9)
    if len(everything) > 1:
        deviation = statistics.stdev(everything)
        expected = deviation if deviation > 1e-8 else 1.0
        assert moments.deviation == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_moments_are_put_back_exactly():
    """What a step has added is taken back when the step is refused, and a resumed run goes on from a file."""
    moments = RunningMoments()
    moments.update([0.1, 0.7, 5.3])
    kept = json.loads(json.dumps(moments.state_dict()))
    before = moments.mean, moments.deviation
    moments.update([100.0])
    assert (moments.mean, moments.deviation) != before
    moments.load_state_dict(kept)
    assert (moments.mean, moments.deviation) == before


def test_a_deviation_survives_outcomes_that_are_far_from_zero():
    moments = RunningMoments()
    for batch in ([1e8, 1e8 + 1], [1e8 + 2], [1e8 + 3]):
        moments.update(batch)
    assert moments.deviation == pytest.approx(statistics.stdev([0, 1, 2, 3]))


def test_outcomes_are_punished_then_normalised_then_clipped():
    shaping = OutcomeShaping(20, overlong_buffer=10, normalise=True, clip=1.0)
    moments = RunningMoments()
    shaped = shape_outcomes([1.0, 1.0, 5.0], [10, 20, 10], shaping, moments)
    punished = [1.0, 0.0, 5.0]
    mean, deviation = statistics.mean(punished), statistics.stdev(punished)
    assert shaped == pytest.approx([max(min((x - mean) / deviation, 1.0), -1.0) for x in punished])
    assert shaping_metrics(shaped, shaping, moments) == pytest.approx(
        {
            "reward/shaped/mean": statistics.mean(shaped),
            "reward/shaped/min": min(shaped),
            "reward/shaped/max": 1.0,
            "reward/running_mean": mean,
            "reward/running_std": deviation,
        }
    )


def test_as_it_stands_nothing_is_shaped():
    moments = RunningMoments()
    assert shape_outcomes([3.0, -7.0], [50, 1], OutcomeShaping(9), moments) == [3.0, -7.0]
    assert moments.state_dict()["count"] == 0


def test_equal_outcomes_are_centred_and_not_blown_up():
    assert shape_outcomes([3.0, 3.0], [1, 1], OutcomeShaping(9, normalise=True), RunningMoments()) == [0, 0]


def test_a_change_of_the_outcome_stands_at_the_last_action():
    actions = torch.tensor([False, True, True, False, False, True])
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 2.0])
    changed = add_at_last_action(rewards, torch.tensor([-0.5, 7.0, 1.0]), actions, segments_of(4, 1, 1))
    assert changed.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 3.0]


def test_trajectories_that_are_dropped_do_not_train():
    mask = torch.tensor([False, True, True, False, True])
    assert without_trajectories(mask, torch.tensor([True, False]), segments_of(3, 2)).tolist() == [False] * 4 + [True]
