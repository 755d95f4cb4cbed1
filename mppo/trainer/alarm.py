"""What ends all ranks when one of them fails alone, while the others wait for it in a collective.

The rank that fails says so in the store that all ranks joined by. On every other rank a thread looks there: it runs
beside the main thread, which waits and cannot be woken. Each rank then puts down what it holds, without a collective,
and ends; the first cause is printed once, by the rank whose it was.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from mppo.errors import MppoError

LOOK_S = 0.5
"""Seconds between two looks at the store."""
PATIENCE_S = 120.0
"""Seconds that a rank has for putting down what it holds, and that others wait for it."""
EXIT_CODE = 3


class Alarm:
    """Of one rank."""

    def __init__(self, rescue: Callable[[dist.Store], str]):
        """`rescue(store)` puts down what this rank holds, and says in words what came of it on all ranks."""
        self._rescue = rescue
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("mppo/alarm", shared.clone())  # a connection of its own: another thread reads it
        self._store.set_timeout(timedelta(seconds=PATIENCE_S))
        self._is_over = threading.Event()
        self._ending = threading.Lock()
        threading.Thread(target=self._watch, name="alarm", daemon=True).start()

    def off(self) -> None:
        """Nothing can fail any more."""
        self._is_over.set()

    def sound(self, error: BaseException) -> NoReturn:
        """End this rank, and all others."""
        said = self._store.compare_set("cause", "", f"{dist.get_rank()}").decode()
        if said == f"{dist.get_rank()}":
            print(f"mppo: rank {said} failed alone: {_told(error)}", file=sys.stderr, flush=True)
        self._end()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                sounded = self._store.check(["cause"])
            except (RuntimeError, OSError):  # the store is gone, and with it the launcher
                return
            if sounded:
                self._end()

    def _end(self) -> NoReturn:
        self._ending.acquire()  # never released: the main thread may fail too, as its peers go away
        said = self._rescue(self._store)
        if dist.get_rank() == 0:
            print(f"mppo: {said}", file=sys.stderr, flush=True)
        self._leave_together()
        os._exit(EXIT_CODE)

    def _leave_together(self) -> None:
        """Whoever launched the ranks ends them all once the first has ended."""
        waited_until = time.monotonic() + PATIENCE_S
        self._store.add("done", 1)
        while self._store.add("done", 0) < dist.get_world_size() and time.monotonic() < waited_until:
            time.sleep(LOOK_S)
        time.sleep(LOOK_S)  # so that all have seen it


def _told(error: BaseException) -> str:
    if isinstance(error, MppoError):
        return error.told()
    return "\n" + "".join(traceback.format_exception(error))
