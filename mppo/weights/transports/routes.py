"""What of a plan goes to one server: messages in rounds, and the manifest by which its workers take them in."""

from dataclasses import dataclass
from typing import Any

from mppo.weights.sglang_layout import Worker
from mppo.weights.transfer_plan import Layout, Region, Send

ALONE_BYTES = 128 << 10
"""A part of so many bytes that goes whole is a message of its own. It is neither packed nor, where it is in one piece
in the worker's parameter, unpacked: to copy through new memory takes longer than to send."""


@dataclass(frozen=True)
class Message:
    """What travels together from one rank to one worker in a round."""

    source: int
    worker: Worker
    sends: tuple[Send, ...]

    @property
    def bytes(self) -> int:
        return sum(send.bytes for send in self.sends)


@dataclass(frozen=True, eq=False)
class Route:
    """All that goes to one server, the same on every rank."""

    server: int
    workers: int
    rounds: tuple[tuple[Message, ...], ...]
    senders: tuple[int, ...]
    """Trainer ranks that have a part in it. In the group of this route they come first, in this order, and the workers
    after them."""

    @property
    def size(self) -> int:
        return len(self.senders) + self.workers

    def place(self, holder: int | Worker) -> int:
        """The rank within the group."""
        return len(self.senders) + holder.tp_rank if isinstance(holder, Worker) else self.senders.index(holder)

    @property
    def bytes(self) -> int:
        return sum(message.bytes for messages in self.rounds for message in messages)


def manifest(route: Route, layout: Layout, tp_rank: int) -> dict[str, Any]:
    """What a worker is to agree to before anything travels, as JSON: its parameters, and the parts that come from whom.

    Parts are `[name, index, dim, start, stop]`, as in `Region`.
    """
    worker = Worker(route.server, tp_rank)
    holding = layout.holdings[worker]
    rounds = [
        [
            {"from": route.place(message.source), "parts": [_part(send.write) for send in message.sends]}
            for message in messages
            if message.worker == worker
        ]
        for messages in route.rounds
    ]
    return {
        "dtype": str(next(iter(layout.tensors.values())).dtype),
        "shapes": {name: list(shape) for name, shape in holding.shapes.items()},
        "padding": [_part(region) for region in holding.padding],
        "rounds": [messages for messages in rounds if messages],
        "alone_bytes": ALONE_BYTES,
    }


def _part(region: Region) -> list[Any]:
    return [region.name, region.index, region.dim, region.start, region.stop]
