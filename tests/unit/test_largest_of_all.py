import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.policy_losses.largest_of_all import among_largest, sortable
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.samples import assignments, held_by

pytestmark = pytest.mark.unit

SCORES = st.sampled_from([-torch.inf, -1e300, -2.5, -1e-300, -0.0, 0.0, 1e-300, 0.5, 1.0, 3.0, torch.inf])


@given(st.lists(SCORES, max_size=12), st.integers(1, 14), st.data())
def test_the_largest_are_those_of_a_sort_and_of_equals_the_first(scores, count, data):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    expected = {i: i in order[:count] for i in range(len(scores))}
    x = torch.tensor(scores, dtype=torch.double)
    held = held_by(data.draw(assignments(len(scores))))
    found = on_simulated_ranks(
        held, lambda mine, reduction: among_largest(x[mine], torch.tensor(mine).long(), count, reduction).tolist()
    )
    assert {
        i: taken for mine, ranks in zip(held, found, strict=True) for i, taken in zip(mine, ranks, strict=True)
    } == (expected)


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=2))
def test_keys_are_in_the_order_of_the_scores(pair):
    keys = sortable(torch.tensor(pair, dtype=torch.double)).tolist()
    assert (keys[0] < keys[1]) == (pair[0] < pair[1]) and (keys[0] == keys[1]) == (pair[0] == pair[1])
