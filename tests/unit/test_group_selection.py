import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.group_selection import select_groups

pytestmark = pytest.mark.unit


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
