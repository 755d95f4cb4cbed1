"""Work of the host that is done while the device is busy with what came before."""

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class OneAhead(Generic[T]):
    """The items of an iterator. Whoever works on one may have the next made, by `fetch`, before asking for it."""

    def __init__(self, items: Iterator[T]):
        self._items = items
        self._fetched: list[T] = []

    def __iter__(self) -> Iterator[T]:
        while True:
            self.fetch()
            if not self._fetched:
                return
            yield self._fetched.pop()

    def fetch(self) -> None:
        """Make the next item, if there is one and it is not made yet."""
        if not self._fetched:
            self._fetched.extend(islice(self._items, 1))
