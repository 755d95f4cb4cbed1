"""A plan by shares: who sends how much to whom, without a list of all sends, which `transfer_plan.plan` makes.

Ranks that hold the same share one Holding, and so do the workers of like servers. What goes from one set of holders to
one kind of target is the same list for all of them, and is made once. For each set of holders, these lists for all
targets stand in a line, which is cut into one stretch for each of the holders. So a target takes its part from few
ranks, a rank sends to few targets, and the sends of any rank or target can be listed alone.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch

from mppo.errors import ModelError
from mppo.weights.transfer_plan import (
    LARGEST_SEND,
    Holder,
    Holding,
    Layout,
    Piece,
    Region,
    Replicas,
    Send,
    by_tensor,
)

Kind = int
"""Holders of one Holding, by the number of the first among the holders of its layout."""


@dataclass(frozen=True)
class _Slice:
    """What one send brings, whoever sends it to whomever."""

    hf: Region
    write: Region
    origins: Mapping[Kind, Piece]
    """Where kinds of sources have it."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def send(self, source: Holder, kind: Kind, target: Holder) -> Send:
        origin = self.origins[kind]
        read = origin.own.part(self.hf.start - origin.hf.start, self.hf.stop - origin.hf.start)
        return Send(source, target, self.hf, read, self.write, self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class _List:
    """What one kind of target takes from one set of holders."""

    slices: tuple[_Slice, ...]
    ends: tuple[int, ...]
    """Bytes up to each place between slices; the first is 0."""

    @classmethod
    def of(cls, slices: Sequence[_Slice]) -> "_List":
        return cls(tuple(slices), (0, *accumulate(s.bytes for s in slices)))

    @property
    def bytes(self) -> int:
        return self.ends[-1]

    def place(self, position: int) -> int:
        """The place between slices that is nearest to so many bytes."""
        after = bisect_left(self.ends, position)
        if after and position - self.ends[after - 1] < self.ends[after] - position:
            return after - 1
        return after


@dataclass(frozen=True, eq=False)
class Share:
    """A part of what `target` takes, all from `source`."""

    source: Holder
    target: Holder
    kind: Kind
    """Of the source."""
    part_of: _List
    first: int
    last: int
    """Slices `[first, last)` of that."""

    @property
    def bytes(self) -> int:
        return self.part_of.ends[self.last] - self.part_of.ends[self.first]

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    def sends(self) -> list[Send]:
        return [s.send(self.source, self.kind, self.target) for s in self.part_of.slices[self.first : self.last]]

    def messages(self, limit: int) -> Iterator["Share"]:
        """It in parts of at most `limit` bytes, or of one send."""
        ends, first = self.part_of.ends, self.first
        while first < self.last:
            last = min(self.last, max(first + 1, bisect_right(ends, ends[first] + limit) - 1))
            yield Share(self.source, self.target, self.kind, self.part_of, first, last)
            first = last


def spread(source: Layout, target: Layout, largest: int = LARGEST_SEND) -> tuple[Share, ...]:
    """Fill every piece of `target` from `source`, each entry once: all shares, the same tuple on every process.

    A target that holds an entry itself copies it. All else its holders send, as evenly as sends of at most `largest`
    bytes allow: none sends more than one send above or below the mean of those that hold the same pieces. Targets take
    from holders in the order in which both layouts name them, so that neighbours serve neighbours.
    Raises ModelError for what no holder of the source has.
    """
    kinds, takers = _Kinds(source), _Kinds(target)
    held = {name: Replicas(pieces) for name, pieces in by_tensor(kinds.layout).items()}
    lists = {kind: _lists(source, target, held, holding, largest) for kind, holding in takers.holdings.items()}
    lines: dict[tuple[Kind, ...], list[tuple[Holder, _List]]] = {}
    for holder, kind in takers.of.items():
        for group, made in lists[kind].items():
            lines.setdefault(group, []).append((holder, made))
    sent = dict.fromkeys(source.holdings, 0)
    shares: list[Share] = []
    # Those that only few can send come first, so that the others level what these were left with.
    for group in sorted(lines, key=lambda g: sum(len(kinds.members[kind]) for kind in g)):
        holders = sorted((holder for kind in group for holder in kinds.members[kind]), key=kinds.number.__getitem__)
        for share in _of_line(lines[group], holders, kinds.of, sent):
            shares.append(share)
            if not share.is_local:
                sent[share.source] += share.bytes
    return tuple(shares)


class _Kinds:
    """The different holdings of a layout, and who has them."""

    def __init__(self, layout: Layout):
        self.number = {holder: number for number, holder in enumerate(layout.holdings)}
        self.of: dict[Holder, Kind] = {}
        self.members: dict[Kind, list[Holder]] = {}
        self.holdings: dict[Kind, Holding] = {}
        known: dict[int, Kind] = {}
        for holder, holding in layout.holdings.items():
            kind = known.setdefault(id(holding), self.number[holder])
            self.of[holder] = kind
            self.members.setdefault(kind, []).append(holder)
            self.holdings[kind] = holding
        self.layout = Layout(layout.tensors, dict(self.holdings))


def _lists(
    source: Layout, target: Layout, held: Mapping[str, Replicas], holding: Holding, largest: int
) -> dict[tuple[Kind, ...], _List]:
    """What a kind of target takes, by the kinds of holders that all have it."""
    found: dict[tuple[Kind, ...], list[_Slice]] = {}
    for piece in holding.pieces:
        name, dim = piece.hf.name, piece.hf.dim
        if name not in held:
            raise ModelError(f"no rank of the source holds {name}")
        tensor = source.tensors[name]
        dtype = min(tensor.dtype, target.tensors[name].dtype, key=lambda d: d.itemsize)
        before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
        step = max(1, largest // (prod(before) * prod(after) * dtype.itemsize))
        for start, stop, origins in held[name].overlaps(piece.hf):
            slices = found.setdefault(tuple(origins), [])
            for begin in range(start, stop, step):
                end = min(begin + step, stop)
                slices.append(
                    _Slice(
                        hf=Region(name, dim, begin, end),
                        write=piece.own.part(begin - piece.hf.start, end - piece.hf.start),
                        origins=origins,
                        shape=(*before, end - begin, *after),
                        dtype=dtype,
                    )
                )
    return {group: _List.of(slices) for group, slices in found.items()}


def _of_line(
    line: list[tuple[Holder, _List]], holders: list[Holder], kind_of: Mapping[Holder, Kind], sent: Mapping[Holder, int]
) -> Iterator[Share]:
    """The lists of all targets one after the other, cut into a stretch for each holder."""
    own, travelling = set(holders), []
    for target, made in line:
        if target in own:
            yield Share(target, target, kind_of[target], made, 0, len(made.slices))
        else:
            travelling.append((target, made))
    starts = [0, *accumulate(made.bytes for _, made in travelling)]
    bounds = [0, *accumulate(level(starts[-1], [sent[holder] for holder in holders]))]
    stretches = list(zip(holders, pairwise(bounds), strict=True))
    at = 0
    for (target, made), start in zip(travelling, starts[:-1], strict=True):
        while stretches[at][1][1] <= start and at + 1 < len(stretches):
            at += 1
        number = at
        first = 0
        while first < len(made.slices):
            holder, (_, stop) = stretches[number]
            last = len(made.slices) if number + 1 == len(stretches) else made.place(min(stop - start, made.bytes))
            if last > first:
                yield Share(holder, target, kind_of[holder], made, first, last)
                first = last
            number += 1


def level(amount: int, loads: Sequence[int]) -> list[int]:
    """How much of `amount` each is given, so that the smallest loads rise together."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    below = 0
    for count, number in enumerate(order, 1):
        below += loads[number]
        if count == len(order) or (amount + below) <= count * loads[order[count]]:
            height, rest = divmod(amount + below, count)
            given = [0] * len(loads)
            for place, lowest in enumerate(order[:count]):
                given[lowest] = height + (place < rest) - loads[lowest]
            return given
    return []
