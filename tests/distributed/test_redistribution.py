"""Trajectories move between the replicas of several layouts with all they have; every mini-batch is balanced."""

import pytest

from tests.distributed.launch import torchrun_results
from tests.distributed.redistribution_worker import CASES, EPOCHS

pytestmark = pytest.mark.distributed

PROCESSES = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return torchrun_results("redistribution_worker.py", PROCESSES, tmp_path_factory.mktemp("moves") / "found.json")


@pytest.mark.parametrize("layout", CASES)
def test_every_field_of_every_trajectory_arrives_unchanged_and_in_order(found, layout):
    assert len(found[layout]) == PROCESSES
    for rank in found[layout]:
        assert not any(rank["moves"].values()), rank["moves"]
        assert not rank["epochs"]["differing"]


@pytest.mark.parametrize("layout", CASES)
def test_every_mini_batch_of_shuffled_epochs_is_balanced_by_itself(found, layout):
    """No two ranks differ by more than the heaviest trajectory of the mini-batch."""
    for rank in found[layout]:
        assert rank["epochs"]["excess"] <= 0
        assert rank["epochs"]["assignments"] == EPOCHS
