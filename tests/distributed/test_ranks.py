"""Ranks that return, fail, hang or are killed; and nothing of one case is left in the next."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from mppo.config import ParallelConfig
from mppo.megatron import topology
from tests.distributed import ranks
from tests.distributed.ranks import call_on_ranks, run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.quick]


def sum_of_ranks(start: int) -> int:
    topology.initialize(ParallelConfig(), seed=1)
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    topology.shutdown()
    return total.item()


def test_ranks_find_each_other_and_return_what_the_function_does():
    for processes in (1, 3):
        assert call_on_ranks(sum_of_ranks, processes, 10) == [sum(range(10, 10 + processes))] * processes


def changes_what_is_global() -> tuple:
    """What it finds, and then changes."""
    found = (torch.get_default_dtype(), os.environ.get("LEFT_OVER"), torch.initial_seed(), os.getcwd())
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_OVER"] = "something"
    torch.manual_seed(123)
    os.chdir("/")
    return found


def test_nothing_is_left_of_a_case_in_the_next():
    first, second = (call_on_ranks(changes_what_is_global, 1)[0] for _ in range(2))
    assert first == second
    assert first[:2] == (torch.float32, None)


def is_preloaded() -> bool:
    return "mppo.trainer.trainer" in sys.modules and "megatron.core" in sys.modules


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's context survives no fork")
def test_a_rank_starts_with_everything_imported():
    assert call_on_ranks(is_preloaded, 1) == [True]


def second_rank_fails() -> None:
    print("starting", flush=True)
    if os.environ["RANK"] == "1":
        raise ValueError("this one")
    time.sleep(60)


def test_a_rank_that_raises_ends_all_and_is_shown(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    with pytest.raises(AssertionError, match="second_rank_fails on 2 processes failed") as caught:
        call_on_ranks(second_rank_fails, 2)
    shown = str(caught.value)
    assert "ValueError: this one" in shown and "rank 0, exit code -9:\nstarting" in shown


def never_ends() -> None:
    print("waiting", flush=True)
    time.sleep(60)


def test_ranks_over_their_time_are_killed_with_their_output_kept():
    ended = run_on_ranks(never_ends, 2, timeout=5)
    assert ended.exit_codes == [-signal.SIGKILL] * 2
    assert ended.output == "waiting\n" * 2


def ends_with(code: int) -> None:
    sys.exit(code)


def test_exit_codes_are_those_of_the_processes():
    assert run_on_ranks(ends_with, 2, 2).exit_codes == [2, 2]
