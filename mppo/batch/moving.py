"""Trajectories that change hands between data-parallel ranks, with every field they have."""

from collections.abc import Callable
from itertools import chain

from torch import Tensor

from mppo.batch.batch_plan import by_rank
from mppo.batch.packed import PackedBatch

Swap = Callable[[Tensor, list[int], list[int]], Tensor]
"""`(x, sent, received)`: the first `sent[0]` rows of `x` go to rank 0, the next `sent[1]` to rank 1, and so on; returns
the rows that come here, `received[r]` of them from rank r, in order of rank."""


def moved(
    batch: PackedBatch, before: list[int], after: list[int], lengths: list[int], rank: int, ranks: int, swap: Swap
) -> PackedBatch:
    """What rank `rank` of `ranks` holds once every trajectory is on the rank that `after` names, in order of index.

    `batch` is what it holds by `before`; `lengths` are tokens of every trajectory of the global batch. Every rank knows
    who sends what, so nothing but the fields travels. Every rank calls `swap` as often: for each field that there is.
    """

    def held(rank_of: list[int]) -> list[int]:
        return [index for index, owner in enumerate(rank_of) if owner == rank]

    mine, wanted = held(before), held(after)
    outgoing = by_rank(mine, [after[i] for i in mine], ranks)
    incoming = by_rank(wanted, [before[i] for i in wanted], ranks)

    def swapped(size: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
        sent, received = ([sum(map(size, part)) for part in parts] for parts in (outgoing, incoming))
        return lambda x: swap(x, sent, received)

    place_of = {index: place for place, index in enumerate(batch.indices.tolist())}
    leaving = batch.select([place_of[i] for i in chain.from_iterable(outgoing)])
    arriving = list(chain.from_iterable(incoming))
    arrived = leaving.exchanged([lengths[i] for i in arriving], swapped(lengths.__getitem__), swapped(lambda _: 1))
    in_order = sorted(range(len(arriving)), key=arriving.__getitem__)
    return arrived.select(in_order).with_fields(origin=None)
