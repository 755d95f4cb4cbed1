"""Length penalty, running normalisation, clip, masking of cut answers, and the choice of groups with a signal."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.packed import pack
from mppo.batch.trajectory import Trajectory
from mppo.config import OverlongBufferConfig, RewardConfig
from mppo.trainer.batches import TrajectoryTable
from mppo.trainer.collecting import select_groups
from mppo.trainer.shaping import (
    RunningMoments,
    add_to_outcomes,
    overlong_penalty,
    shape_outcomes,
    without_truncated,
)

pytestmark = pytest.mark.unit

NUMBERS = st.floats(-10, 10)


def table(outcomes, responses=None):
    count = len(outcomes)
    responses = responses or [1] * count
    nothing = [0] * count
    return TrajectoryTable(
        lengths=responses,
        responses=responses,
        actions=responses,
        groups=nothing,
        rewards=outcomes,
        outcomes=outcomes,
        accuracies=outcomes,
        truncated=[False] * count,
        parts=[{}] * count,
        rank_of=nothing,
        kept=responses,
    )


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


def trajectory(index, actions, reward=1.0):
    mask = torch.tensor([False, *actions])
    return Trajectory(index, index, torch.arange(len(mask)), mask, torch.zeros(len(mask)), reward=reward)


def test_a_change_of_the_outcome_stands_at_the_last_action_whatever_the_order():
    batch = pack([trajectory(1, [True, True, False]), trajectory(0, [False]), trajectory(2, [True], reward=2.0)])
    changed = add_to_outcomes(batch, [7.0, -0.5, 1.0])
    assert changed.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0]


def test_answers_that_were_cut_off_do_not_train():
    batch = pack([trajectory(1, [True, True]), trajectory(0, [True])])
    assert without_truncated(batch, [False, True]).tolist() == [False, False, False, True, False]


def test_tool_output_counts_as_response_and_the_prompt_does_not():
    assert trajectory(0, [False, True, False, True, False]).response_length == 4
    assert trajectory(0, [False]).response_length == 0


@given(
    st.dictionaries(st.integers(0, 30), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4)),
    st.integers(1, 6),
)
def test_groups_with_signal_come_first_and_nothing_is_lost(values, wanted):
    selection = select_groups(values, wanted)
    signal = [group for group, of_group in values.items() if len(set(of_group)) > 1]
    assert len(selection.chosen) == min(wanted, len(values))
    assert len(set(selection.chosen) & set(signal)) == min(wanted, len(signal))
    assert selection.with_signal + selection.without_signal == len(values)
    assert selection.used_without_signal == len(set(selection.chosen) - set(signal))
    assert selection.metrics(1)["rollout/groups_left_out"] == len(values) - len(selection.chosen)


def test_the_first_groups_with_signal_are_taken_in_order():
    values = {0: [1, 1], 1: [0, 1], 2: [0, 0], 3: [1, 0], 4: [0, 1]}
    assert select_groups(values, 2).chosen == [1, 3]
    assert select_groups(values, 4).chosen == [0, 1, 3, 4]
