import pytest
import torch
from hypothesis import given

from tests.unit.samples import packed_batches, segments_of

pytestmark = pytest.mark.unit


def test_each_position_knows_its_trajectory():
    segments = segments_of(2, 0, 3)
    assert segments.ids.tolist() == [0, 0, 2, 2, 2]
    assert segments.count == 3


def test_sums_means_and_lengths_are_per_trajectory():
    segments, mask = segments_of(3, 2), torch.tensor([True, False, True, True, True])
    x = torch.tensor([1.0, 10.0, 3.0, 5.0, 6.0])
    assert segments.sum(x, mask).tolist() == [4.0, 11.0]
    assert segments.mean(x, mask).tolist() == [2.0, 5.5]
    assert segments.lengths(mask).tolist() == [2, 2]


def test_the_mean_of_an_empty_trajectory_is_zero():
    segments, mask = segments_of(2, 2), torch.tensor([False, False, True, True])
    assert segments.mean(torch.ones(4), mask).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 1e30])
def test_what_the_mask_hides_reaches_neither_sum_nor_gradient(hidden):
    segments, mask = segments_of(2, 1), torch.tensor([True, False, True])
    x = torch.tensor([1.0, hidden, 2.0], requires_grad=True)
    total = segments.sum(x, mask)
    total.sum().backward()
    assert total.tolist() == [1.0, 2.0]
    assert x.grad.tolist() == [1.0, 0.0, 1.0]


@given(packed_batches())
def test_expanding_lengths_counts_each_position_as_often_as_its_trajectory_is_long(batch):
    everywhere = torch.ones(len(batch))
    expanded = batch.segments.expand(batch.segments.lengths(everywhere))
    assert expanded.tolist() == [n for n in batch.lengths for _ in range(n)]
    assert batch.segments.sum(everywhere, everywhere).tolist() == batch.lengths


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 1e30])
def test_the_largest_is_per_trajectory_and_0_where_the_mask_hides_all(hidden):
    mask = torch.tensor([True, False, True, True, False])
    x = torch.tensor([-2.0, hidden, -1.0, -3.0, hidden])
    assert segments_of(3, 1, 1, 0).max(x, mask).tolist() == [-1.0, -3.0, 0.0, 0.0]
