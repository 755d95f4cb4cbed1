"""The order in which micro-batches come to a pipeline stage, against a replay of what the other stages send."""

import pytest

from mppo.megatron.stage_links import arrivals

pytestmark = pytest.mark.unit


def test_without_model_chunks_they_come_in_order():
    assert arrivals(3, stage=1, stages=3, chunks=1, group=3) == ([0, 1, 2], [0, 1, 2])


def test_the_first_stage_gets_no_activations_and_the_last_no_gradients():
    assert arrivals(3, stage=0, stages=2, chunks=1, group=2) == ([], [0, 1, 2])
    assert arrivals(3, stage=1, stages=2, chunks=1, group=2) == ([0, 1, 2], [])


def test_with_chunks_a_group_goes_through_each_before_the_next_group():
    """Four micro-batches, two stages of two chunks: the chunks run 0, 1, 0, 1 over the stages."""
    assert arrivals(4, stage=1, stages=2, chunks=2, group=2) == ([0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3])
    assert arrivals(4, stage=0, stages=2, chunks=2, group=2) == ([0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3])
