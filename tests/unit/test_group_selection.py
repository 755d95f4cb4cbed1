import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.group_selection import Selection, has_signal, select_groups

pytestmark = pytest.mark.unit


def test_answers_that_are_all_worth_the_same_carry_no_signal():
    assert has_signal([0.0, 1.0])
    assert not has_signal([0.5, 0.5])
    assert not has_signal([1.0])
    assert not has_signal([])


def test_groups_with_a_signal_come_first_and_the_oldest_of_them():
    assert select_groups([7, 2, 5], [1, 3], wanted=2) == Selection([2, 5], used_without_signal=0, left_over=1)


def test_groups_without_a_signal_fill_up():
    assert select_groups([5], [9, 3, 4], wanted=3) == Selection([3, 4, 5], used_without_signal=2, left_over=0)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(41, 80)), st.integers(1, 20))
def test_nothing_is_chosen_twice_or_lost(signal, silent, wanted):
    selection = select_groups(signal, silent, wanted)
    assert len(selection.chosen) == len(set(selection.chosen)) == min(wanted, len(signal) + len(silent))
    assert len(signal & set(selection.chosen)) + selection.left_over == len(signal)
    assert len(silent & set(selection.chosen)) == selection.used_without_signal
    assert not (selection.left_over and selection.used_without_signal)
