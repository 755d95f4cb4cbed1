"""Who sends which slice of which tensor to whom, as pure data: the intersection of two layouts.

A layout says for every holder (a trainer rank, a worker of a rollout engine) which intervals of which Hugging Face
tensors it holds, and where they stand in its own parameters. Holders are anything hashable; one that occurs in both
layouts is the same process, and what it holds itself it copies.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mppo.errors import ModelError

Holder = Any
"""Hashable: the rank of a trainer process, or what names a worker of an engine."""
LARGEST_SEND = 64 << 20
"""Bytes; what is larger is cut, so that replicas share the work and buffers stay small."""


@dataclass(frozen=True)
class HFTensor:
    """A whole tensor of the model, and the one dimension along which layouts cut it."""

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Region:
    """Entries `[start, stop)` along `dim` of a tensor, or of its `index`-th member where tensors are stacked."""

    name: str
    dim: int
    start: int
    stop: int
    index: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> "Region":
        """`[start, stop)` counted from the beginning of this region."""
        return Region(self.name, self.dim, self.start + start, self.start + stop, self.index)

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[self.name]
        member = tensor if self.index is None else tensor[self.index]
        return member.narrow(self.dim, self.start, len(self))


@dataclass(frozen=True)
class Piece:
    """An interval of a Hugging Face tensor, and where it stands in a parameter of the holder. Both are as long."""

    hf: Region
    own: Region


@dataclass(frozen=True)
class Holding:
    """What one holder has."""

    shapes: dict[str, tuple[int, ...]]
    """Its own parameters."""
    pieces: tuple[Piece, ...]
    padding: tuple[Region, ...] = ()
    """Zeros in its own parameters that stand for nothing in the model; nobody sends them."""


@dataclass(frozen=True, eq=False)
class Layout:
    tensors: dict[str, HFTensor]
    holdings: dict[Holder, Holding]


@dataclass(frozen=True)
class Send:
    """One slice: `read` in the source's own parameter becomes `write` in the target's."""

    source: Holder
    target: Holder
    hf: Region
    read: Region
    write: Region
    shape: tuple[int, ...]
    dtype: torch.dtype
    """In which it travels: the smaller of both layouts'."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_local(self) -> bool:
        return self.source == self.target


@dataclass(frozen=True, eq=False)
class Plan:
    """All sends, the same list on every process; those of a holder to itself included."""

    sends: tuple[Send, ...]

    def rounds(self, limit: int) -> list[list[Send]]:
        """Those that travel, in rounds in which no holder sends or receives more than `limit` bytes.

        Each send goes into the first round in which both of its ends have room, so there are at most about twice as
        many rounds as the busiest holder needs. One that is larger than the limit has a round of its ends for itself.
        """
        rounds: list[list[Send]] = []
        outgoing: dict[Holder, _Ledger] = defaultdict(lambda: _Ledger(limit))
        incoming: dict[Holder, _Ledger] = defaultdict(lambda: _Ledger(limit))
        for send in self.sends:
            if send.is_local:
                continue
            source, target, size = outgoing[send.source], incoming[send.target], send.bytes
            number = max(source.first_open, target.first_open)
            while not (source.has_room(number, size) and target.has_room(number, size)):
                number += 1
            source.add(number, size)
            target.add(number, size)
            rounds.extend([] for _ in range(number + 1 - len(rounds)))
            rounds[number].append(send)
        return rounds


class _Ledger:
    """The bytes of one holder in each round."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used: list[int] = []
        self.first_open = 0
        """All rounds before it are (nearly) full, and are not looked at again."""

    def has_room(self, number: int, size: int) -> bool:
        used = self.used[number] if number < len(self.used) else 0
        return not used or used + size <= self.limit

    def add(self, number: int, size: int) -> None:
        self.used.extend([0] * (number + 1 - len(self.used)))
        self.used[number] += size
        while self.first_open < len(self.used) and self.used[self.first_open] > self.limit - self.limit // 16:
            self.first_open += 1


def whole_tensors(
    tensors: Mapping[str, HFTensor], names: Mapping[Holder, Iterable[str]], dtype: torch.dtype | None = None
) -> Layout:
    """A layout in which each holder has the whole tensors it is given the names of, under those names.

    `dtype` is that of the holders (None: as in `tensors`).
    """
    if dtype is not None:
        tensors = {name: replace(tensor, dtype=dtype) for name, tensor in tensors.items()}

    def region(name: str) -> Region:
        dim = tensors[name].dim
        return Region(name, dim, 0, tensors[name].shape[dim])

    return Layout(
        dict(tensors),
        {
            holder: Holding(
                {name: tensors[name].shape for name in held},
                tuple(Piece(region(name), region(name)) for name in held),
            )
            for holder, held in ((holder, list(held)) for holder, held in names.items())
        },
    )


def plan(source: Layout, target: Layout, largest: int = LARGEST_SEND) -> Plan:
    """Fill every piece of `target` from `source`, each entry once.

    A target that holds an entry itself copies it. All else comes from whichever of its holders has sent least so far,
    in sends of at most `largest` bytes: of holders of the same pieces, none sends more than that above another.
    Raises ModelError for what no holder of the source has.
    """
    held = {name: Replicas(pieces) for name, pieces in by_tensor(source).items()}
    sent = dict.fromkeys(source.holdings, 0)
    sends: list[Send] = []
    for holder, holding in target.holdings.items():
        for piece in holding.pieces:
            name, dim = piece.hf.name, piece.hf.dim
            if name not in held:
                raise ModelError(f"no rank of the source holds {name}")
            tensor = source.tensors[name]
            dtype = min(tensor.dtype, target.tensors[name].dtype, key=lambda d: d.itemsize)
            row = prod(tensor.shape) // tensor.shape[dim] * dtype.itemsize
            for start, stop, replicas in held[name].overlaps(piece.hf):
                step = stop - start if holder in replicas else max(1, largest // row)
                for begin in range(start, stop, step):
                    end = min(begin + step, stop)
                    sender = holder if holder in replicas else min(replicas, key=lambda r: sent[r])
                    origin = replicas[sender]
                    send = Send(
                        source=sender,
                        target=holder,
                        hf=Region(name, dim, begin, end),
                        read=origin.own.part(begin - origin.hf.start, end - origin.hf.start),
                        write=piece.own.part(begin - piece.hf.start, end - piece.hf.start),
                        shape=(*tensor.shape[:dim], end - begin, *tensor.shape[dim + 1 :]),
                        dtype=dtype,
                    )
                    sends.append(send)
                    if not send.is_local:
                        sent[sender] += send.bytes
    return Plan(tuple(sends))


def by_tensor(layout: Layout) -> dict[str, list[tuple[Holder, Piece]]]:
    """For each tensor its pieces and who has them, in the order of the holders."""
    found: dict[str, list[tuple[Holder, Piece]]] = {}
    for holder, holding in layout.holdings.items():
        for piece in holding.pieces:
            found.setdefault(piece.hf.name, []).append((holder, piece))
    return found


class Replicas:
    """The intervals of one tensor between all places where some holder's piece begins or ends, and who has them."""

    def __init__(self, pieces: list[tuple[Holder, Piece]]):
        self.dim = pieces[0][1].hf.dim
        self.bounds = sorted({bound for _, piece in pieces for bound in (piece.hf.start, piece.hf.stop)})
        self.replicas: list[dict[Holder, Piece]] = [{} for _ in self.bounds]
        for holder, piece in pieces:
            for place in range(self._place(piece.hf.start), self._place(piece.hf.stop)):
                self.replicas[place].setdefault(holder, piece)

    def _place(self, entry: int) -> int:
        return bisect_right(self.bounds, entry) - 1

    def overlaps(self, region: Region) -> Iterable[tuple[int, int, dict[Holder, Piece]]]:
        """`(start, stop, replicas)` of what the region is made of, in order.

        Raises ModelError for another dimension than that of the pieces, and for an entry that nobody has.
        """
        if region.dim != self.dim:
            raise ModelError(f"{region.name} is cut along dim {self.dim} by the source, {region.dim} by the target")
        start = region.start
        while start < region.stop:
            place = self._place(start)
            replicas = self.replicas[place] if place >= 0 else {}
            if not replicas:
                raise ModelError(f"no rank of the source holds entry {start} of {region.name}")
            stop = min(self.bounds[place + 1], region.stop)
            yield start, stop, replicas
            start = stop
