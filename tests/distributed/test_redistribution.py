"""Trajectories move between the replicas of several layouts with all they have; every mini-batch is balanced."""

import pytest

from tests.distributed.ranks import call_on_ranks
from tests.distributed.redistribution_worker import CASES, EPOCHS, moves_and_epochs

pytestmark = [pytest.mark.distributed, pytest.mark.quick]

PROCESSES = 4


@pytest.fixture(scope="module")
def found():
    return call_on_ranks(moves_and_epochs, PROCESSES)[0]


@pytest.mark.parametrize("layout", CASES)
def test_every_field_of_every_trajectory_arrives_unchanged_and_in_order(found, layout):
    assert len(found[layout]) == PROCESSES
    for rank in found[layout]:
        assert not rank["arrivals"]
        assert not any(rank["moves"].values()), rank["moves"]
        assert not rank["epochs"]["differing"]


@pytest.mark.parametrize("layout", CASES)
def test_every_mini_batch_of_shuffled_epochs_is_balanced_by_itself(found, layout):
    """No two ranks differ by more than the heaviest trajectory of the mini-batch."""
    for rank in found[layout]:
        assert rank["epochs"]["excess"] <= 0
        assert rank["epochs"]["assignments"] == EPOCHS
