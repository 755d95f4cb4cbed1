"""Notes between ranks, over a real store in one process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from mppo.errors import EngineError
from mppo.rollout.engines.sglang.board import Board

pytestmark = pytest.mark.unit

KEYS = [f"part/{rank}" for rank in range(40)]


@pytest.fixture
def board() -> Board:
    """Of the first of ranks that are not there."""
    made = Board.__new__(Board)
    made.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made.host, made.port = "127.0.0.1", made.store.port
    return made


def test_who_waits_for_many_notes_leaves_threads_for_those_who_make_them(board):
    async def run() -> list[int]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waiting = asyncio.create_task(board.read_all(KEYS, 20.0))
        await asyncio.sleep(0.1)
        for number, key in enumerate(KEYS):
            await asyncio.wait_for(asyncio.to_thread(board.post, key, number), 5.0)
        return await waiting

    assert asyncio.run(run()) == list(range(40))


def test_notes_that_do_not_come_are_named(board):
    board.post("part/0", {})
    with pytest.raises(EngineError, match=r"within 0\.1 s: part/1, part/2"):
        asyncio.run(board.read_all(KEYS[:3], 0.1))


def test_a_note_is_there_until_it_is_taken_down(board):
    board.post("a", {"b": [1, "c"]})
    assert board.found("a") == {"b": [1, "c"]}
    board.take_down("a")
    assert board.found("a") is None
