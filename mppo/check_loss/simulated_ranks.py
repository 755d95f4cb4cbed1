"""Several ranks in one process: threads that exchange tensors where ranks would call a collective."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction

Held = TypeVar("Held")
PATIENCE = 30.0
"""Seconds that a rank waits for the others: those that reduce unequally must not wait for ever."""


class _Exchange:
    """One rank's view of the others."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier):
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self._slots[self._rank] = x
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x))

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x))


def on_simulated_ranks(held: Sequence[Held], fn: Callable[[Held, Reduction], Any]) -> list[Any]:
    """`fn(held, reduction)` of every rank at the same time; the results, in order. Raises what one of them raises.

    The reduction is over the ranks. Its sums keep the graph, so gradients flow between the ranks.
    """
    slots: list[Any] = [None] * len(held)
    barrier = Barrier(len(held), timeout=PATIENCE)

    def run(rank: int) -> Any:
        try:
            others = _Exchange(rank, slots, barrier)
            return fn(held[rank], Reduction(others.sum, others.stack, others.gather))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(held)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(held))]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        first = next((error for error in errors if not isinstance(error, BrokenBarrierError)), None)
        raise first or RuntimeError("some ranks reduced over the others and some did not: all must, whatever they hold")
    return [future.result() for future in futures]
