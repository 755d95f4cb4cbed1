"""Several ranks in one process: threads that exchange tensors where ranks would call a collective."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction

Part = TypeVar("Part")
PATIENCE = 30.0
"""Seconds that a part waits for the others: those that call an exchange unequally must not wait for ever."""


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

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).amax(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x))


def on_simulated_ranks(parts: Sequence[Part], fn: Callable[[Part, Reduction], Any]) -> list[Any]:
    """`fn(part, reduction)` of each part at the same time; the results, in order. Raises what one of them raises.

    The reduction is over the parts. Its sums keep the graph, so gradients flow between the ranks.
    """
    slots: list[Any] = [None] * len(parts)
    barrier = Barrier(len(parts), timeout=PATIENCE)

    def run(rank: int) -> Any:
        try:
            others = _Exchange(rank, slots, barrier)
            return fn(parts[rank], Reduction(others.sum, others.max, others.gather))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(parts))]
        errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        first = next((error for error in errors if not isinstance(error, BrokenBarrierError)), None)
        raise first or RuntimeError("some ranks reduced over the others and some did not: all must, whatever they hold")
    return [future.result() for future in futures]
