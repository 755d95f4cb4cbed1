"""Length penalty, running normalisation, clip, and masking of cut answers."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.config import OverlongBufferConfig, RewardConfig
from mppo.trainer.shaping import (
    RunningMoments,
    add_to_outcomes,
    overlong_penalty,
    shape_outcomes,
    without_truncated,
)
from tests.unit.samples import answer, pack_answers, table_of

pytestmark = pytest.mark.unit

NUMBERS = st.floats(-10, 10)


def table(outcomes, responses=None):
    responses = responses or [1] * len(outcomes)
    return table_of(responses, responses, [0] * len(outcomes), outcomes)


@pytest.mark.parametrize(("response", "penalty"), [(0, 0), (60, 0), (80, 0), (85, -0.5), (90, -1), (100, -2)])
def test_the_penalty_grows_linearly_over_the_last_tokens(response, penalty):
    """DAPO: maximum 100, buffer 20, factor 2."""
    assert overlong_penalty(response, OverlongBufferConfig(len=20, penalty_factor=2.0), 100) == pytest.approx(penalty)


def test_without_a_buffer_length_costs_nothing():
    assert overlong_penalty(100, OverlongBufferConfig(), 100) == 0.0


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


def test_outcomes_are_punished_then_normalised_then_clipped():
    reward = RewardConfig(overlong_buffer=OverlongBufferConfig(len=10), running_normalization=True, clip=1.0)
    shaped = shape_outcomes(table([1.0, 1.0, 5.0], [10, 20, 10]), reward, 20, RunningMoments())
    punished = [1.0, 0.0, 5.0]
    mean, deviation = statistics.mean(punished), statistics.stdev(punished)
    assert shaped == pytest.approx([max(min((x - mean) / deviation, 1.0), -1.0) for x in punished])


def test_equal_outcomes_are_centred_and_not_blown_up():
    assert shape_outcomes(table([3.0, 3.0]), RewardConfig(running_normalization=True), 9, RunningMoments()) == [0, 0]


def judged(actions, score=1.0):
    return answer([0, *actions], score=score)


def test_a_change_of_the_outcome_stands_at_the_last_action_whatever_the_order():
    batch = pack_answers([judged([1, 1, 0]), judged([0]), judged([1], score=2.0)], [1, 0, 2])
    changed = add_to_outcomes(batch, [7.0, -0.5, 1.0])
    assert changed.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0]


def test_answers_that_were_cut_off_do_not_train():
    batch = pack_answers([judged([1, 1]), judged([1])], [1, 0])
    assert without_truncated(batch, [False, True]).tolist() == [False, False, False, True, False]
