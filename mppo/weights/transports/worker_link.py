"""Slices from this rank to the workers of one server, point to point: whole, or the entries that changed.

The other end is `mppo_receiver.py`, which runs inside the workers and says how a message is made up.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.megatron import platform
from mppo.weights.transfer_plan import Region, Send
from mppo.weights.transports.handles import Handles, Taken
from mppo.weights.transports.routes import ALONE_BYTES, Message, Route

WHOLE = -1
IN_FLIGHT = 2
"""Rounds under way at a time: while one travels the next is packed."""


@dataclass
class Traffic:
    """What a rank sent to a server in one refit."""

    bytes: int = 0
    entries: int = 0
    """Of the parameters that were compared or sent."""
    changed: int = 0
    """Those that were sent, one by one or in a whole part."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes + other.bytes, self.entries + other.entries, self.changed + other.changed)


class LastSent:
    """What this rank sent last, slice by slice in the type in which it travels, on the host.

    It costs as much memory as the rank sends: a copy of its shards, divided by the replicas that share the work.
    """

    def __init__(self) -> None:
        self._slices: dict[Region, Tensor] = {}

    def keep(self, route: Route, rank: int, tensors: Mapping[str, Tensor]) -> None:
        for send in _sends_of(route, rank):
            now = _now(send, tensors)
            if send.read not in self._slices:
                self._slices[send.read] = torch.empty(now.shape, dtype=now.dtype)
            self._slices[send.read].copy_(now)

    def changed(self, send: Send, now: Tensor) -> Tensor:
        """The places in a flattened slice whose bits differ from what was sent last."""
        before = self._slices[send.read].to(now.device).view(-1)
        return torch.nonzero(_bits(now).ne(_bits(before))).view(-1)


class WorkerLink:
    """This rank's connections to the workers of a server."""

    def __init__(self, route: Route, rank: int, store: dist.Store, host: str, timeout_s: float, *, handles: bool):
        """Waits for the workers, and the other senders, to join; with `handles` memory is handed over instead.

        Raises RuntimeError when they do not in time.
        """
        self.route, self.rank, self.timeout = route, rank, timedelta(seconds=timeout_s)
        place = route.place(rank)
        self.group: dist.ProcessGroup | Handles
        if handles:
            self.group = Handles(store, place)
        else:
            self.group = platform.outside_group(store, place, route.size, self.timeout, host)

    @torch.no_grad()
    def send(self, tensors: Mapping[str, Tensor], since: LastSent | None, largest_share: float) -> Traffic:
        """All rounds: with `since` only what changed, but parts of which more than `largest_share` did, whole.

        Raises RuntimeError when a worker is gone, or does not take what it is sent in time.
        """
        traffic, flying = Traffic(), deque[list[tuple[Tensor, "dist.Work | Taken"]]]()
        for messages in self.route.rounds:
            if len(flying) == IN_FLIGHT:
                self._land(flying.popleft())
            works = []
            for message in messages:
                if message.source == self.rank:
                    packed = Packed(message, tensors, since, largest_share)
                    traffic += packed.traffic
                    works += [(buffer, self._start(buffer, message)) for buffer in packed.buffers if buffer.numel()]
            flying.append(works)
        while flying:
            self._land(flying.popleft())
        platform.wait_for_device()
        return traffic

    def _start(self, buffer: Tensor, message: Message) -> "dist.Work | Taken":
        return self.group.send([buffer], self.route.place(message.worker), 0)

    def _land(self, works: list[tuple[Tensor, "dist.Work | Taken"]]) -> None:
        for _, work in works:
            work.wait(self.timeout)

    def close(self) -> None:
        """Break the connections, so that the other end sees it."""
        self.group.abort()


class Packed:
    """A message as bytes: what is small in one buffer, then each large part in its own memory.

    A delta is one buffer, and a header comes first: for each part how many entries changed.
    """

    def __init__(self, message: Message, tensors: Mapping[str, Tensor], since: LastSent | None, largest_share: float):
        counts: list[int] = []
        places: list[Tensor] = []
        values: list[Tensor] = []
        alone: list[Tensor] = []
        self.traffic = Traffic()
        for send in message.sends:
            now = _now(send, tensors).reshape(-1).contiguous()  # a column is not, flattened
            at = None if since is None else since.changed(send, now)
            if at is not None and len(at) <= largest_share * now.numel():
                counts.append(len(at))
                places.append(at.to(torch.int32))
                now = now[at]
            else:
                counts.append(WHOLE)
            (alone if since is None and now.nbytes >= ALONE_BYTES else values).append(now)
            self.traffic += Traffic(0, prod(send.shape), now.numel())
        packed = [x.view(torch.uint8) for x in (*places, *values)]
        self.buffers = [torch.cat(packed)] if packed else []
        self.buffers = [x.to(platform.device()) for x in (*self.buffers, *(x.view(torch.uint8) for x in alone))]
        if since is not None:
            self.buffers.insert(0, torch.tensor(counts, dtype=torch.int32, device=platform.device()))
        self.traffic.bytes = sum(buffer.nbytes for buffer in self.buffers)


def _now(send: Send, tensors: Mapping[str, Tensor]) -> Tensor:
    return send.read.view(tensors).to(send.dtype)


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _sends_of(route: Route, rank: int) -> list[Send]:
    return [send for messages in route.rounds for m in messages if m.source == rank for send in m.sends]
