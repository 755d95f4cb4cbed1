"""The ranges a profiler shows: the nine steps, and each micro-batch's forward and backward."""

import pytest

from tests.distributed.profile_worker import ranges_of_a_step
from tests.distributed.ranks import call_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.quick]

NINE_STEPS = (
    "sample",
    "reward",
    "balance",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "update_critic",
    "update_actor",
)
MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def ranges(tmp_path_factory):
    return call_on_ranks(ranges_of_a_step, 2, tmp_path_factory.mktemp("profile"))[0]


@pytest.mark.parametrize("step", NINE_STEPS)
def test_each_of_the_nine_steps_is_one_range(ranges, step):
    assert ranges[step] == 1


def test_each_micro_batch_has_a_forward_and_a_backward_range(ranges):
    passes = 3  # values, critic update, actor update: its one step needs no pass for old log-probs
    assert ranges["forward-compute"] == passes * MICRO_BATCHES
    assert ranges["backward-compute"] == 2 * MICRO_BATCHES
