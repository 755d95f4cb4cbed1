"""Routes to many servers: each is made when it is asked for, by whoever needs it, and has few senders."""

from collections.abc import Iterable
from dataclasses import dataclass

from mppo.weights.sglang_layout import Worker
from mppo.weights.spread import Share, spread
from mppo.weights.transfer_plan import LARGEST_SEND, Layout
from mppo.weights.transports.routes import Message, Route


@dataclass(frozen=True, eq=False)
class SpreadRoutes:
    """The same on every rank. A rank makes the routes to `servers_of` it, whoever speaks to a server that server's."""

    of_server: dict[int, tuple[Share, ...]]
    bucket_bytes: int
    """Of a message at most, or of one row of a tensor. Two to each of its servers fit into the buffer of every rank."""

    @classmethod
    def of(cls, source: Layout, target: Layout, buffer_bytes: int) -> "SpreadRoutes":
        """From a trainer's layout to that of `Worker`s. Raises ModelError for what no rank of the source holds."""
        largest = min(LARGEST_SEND, buffer_bytes // 2)
        while True:
            made = _by_server(spread(source, target, largest))
            bucket = buffer_bytes // (2 * _most_servers(made))
            if bucket >= largest:
                return cls(made, bucket)
            largest = bucket

    def servers_of(self, rank: int) -> list[int]:
        """Those to which the rank sends."""
        return [server for server, shares in self.of_server.items() if any(s.source == rank for s in shares)]

    def route(self, server: int) -> Route:
        """In a round no rank sends, and no worker receives, more than one message."""
        shares = self.of_server[server]
        return Route(
            server=server,
            workers=1 + max(share.target.tp_rank for share in shares),
            rounds=_rounds(message for share in shares for message in share.messages(self.bucket_bytes)),
            senders=tuple(sorted({share.source for share in shares})),
        )


def _by_server(shares: Iterable[Share]) -> dict[int, tuple[Share, ...]]:
    found: dict[int, list[Share]] = {}
    for share in shares:
        found.setdefault(share.target.server, []).append(share)
    return {server: tuple(found[server]) for server in sorted(found)}


def _most_servers(of_server: dict[int, tuple[Share, ...]]) -> int:
    """To which one rank sends."""
    count: dict[int, int] = {}
    for shares in of_server.values():
        for source in {share.source for share in shares}:
            count[source] = count.get(source, 0) + 1
    return max(count.values())


def _rounds(messages: Iterable[Share]) -> tuple[tuple[Message, ...], ...]:
    """Each message in the first round in which its rank and its worker are both free."""
    taken: dict[int | Worker, int] = {}
    rounds: list[list[Message]] = []
    for part in messages:
        busy = taken.get(part.source, 0) | taken.get(part.target, 0)
        free = ~busy & (busy + 1)
        for end in (part.source, part.target):
            taken[end] = taken.get(end, 0) | free
        number = free.bit_length() - 1
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(Message(part.source, part.target, tuple(part.sends())))
    return tuple(map(tuple, rounds))
