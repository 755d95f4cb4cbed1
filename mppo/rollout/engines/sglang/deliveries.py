"""How new weights get to the servers, once they are paused: what every rank does, and what the first asks of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mppo.rollout.engines.sglang.fleet import Member
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transports.worker_link import Traffic


@dataclass(frozen=True)
class Order:
    """What becomes of one server in a refit."""

    server: int
    whole: bool
    """All weights, not what changed since the refit before."""
    join: bool
    """Connections are made anew."""


@dataclass(frozen=True)
class Refit:
    """One update, under the number of actor updates that made the weights; `number` counts refits of this engine."""

    number: int
    version: int


class Delivery(Protocol):
    in_session: bool
    """Between `/begin_weight_update` and `/end_weight_update`."""
    traffic: Traffic
    """What this rank sent to servers in the last refit."""

    async def prepare(self, weights: LiveWeights, refit: Refit) -> None:
        """Every rank, before any server is spoken to."""
        ...

    async def agree(self, member: Member, refit: Refit) -> None:
        """The first rank, of a server with no connections yet: it accepts what is to come. Raises ServerGone."""
        ...

    async def send(self, weights: LiveWeights, orders: Sequence[Order], refit: Refit) -> Mapping[int, str]:
        """Every rank, all its part. Returns what went wrong, by server."""
        ...

    async def take(self, member: Member, order: Order, refit: Refit) -> None:
        """The first rank, at the same time: the server takes the weights under their version. Raises ServerGone."""
        ...

    def close(self) -> None: ...
