"""Every worker of a server receives exactly its own slices, from the ranks that hold them; or of those what changed."""

import asyncio
import base64
import json
import pickle
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mppo.config import SglangConfig
from mppo.megatron import platform
from mppo.rollout.engines.sglang.board import Board
from mppo.rollout.engines.sglang.client import ServerGone
from mppo.rollout.engines.sglang.deliveries import Order, Refit
from mppo.rollout.engines.sglang.fleet import Member
from mppo.weights.live_weights import LiveWeights
from mppo.weights.sglang_layout import Worker
from mppo.weights.transfer_plan import Layout
from mppo.weights.transports.routes import Route, manifest
from mppo.weights.transports.spread_routes import SpreadRoutes
from mppo.weights.transports.worker_link import LastSent, Traffic, WorkerLink

LOADER = "mppo_receiver.load"
ORDER = "__mppo__"
"""See `in_worker/mppo_receiver.py`."""


class Shards:
    """Point to point by plan; with `delta` only the entries that changed, to servers that have the version before."""

    in_session = True

    def __init__(self, config: SglangConfig, board: Board, target: Layout, *, delta: bool):
        self.config, self.board, self.target = config, board, target
        self.last = LastSent() if delta else None
        self.handles = config.colocated and platform.has_cuda()
        """Whether memory is handed over instead of sent."""
        self.spread: SpreadRoutes | None = None
        self.routes: dict[int, Route] = {}
        """By server: those in which this rank has a part."""
        self.links: dict[int, WorkerLink] = {}
        self.names: dict[int, str] = {}
        """Of the group of each server, under which nobody else finds it."""
        self.traffic = Traffic()
        """Of this rank, in the refit before."""
        self.received: dict[Worker, int] = {}
        """Bytes, in the refit before, as the workers say; on the first rank."""

    async def prepare(self, weights: LiveWeights, refit: Refit) -> None:
        """See `Delivery`. The plan is made once; a rank's buffers for all servers together keep the limit."""
        if self.spread is None:
            limit = self.config.buffer_mb << 20
            self.spread = await asyncio.to_thread(SpreadRoutes.of, weights.layout, self.target, limit)
            self.routes = {server: self.spread.route(server) for server in self.spread.servers_of(weights.rank)}

    def route(self, server: int) -> Route:
        """That to any server, once it is planned. Others than this rank's own are made each time: they are large."""
        return self.routes.get(server) or self.spread.route(server)

    async def agree(self, member: Member, refit: Refit) -> None:
        """See `Delivery`. Names, shapes and types of all that is to come."""
        route = self.route(member.number)
        self.names[member.number] = f"mppo-{refit.number}-{member.number}-{secrets.token_hex(8)}"
        meeting = self._meeting(member, route)
        orders = [meeting | {"manifest": manifest(route, self.target, rank)} for rank in range(route.workers)]
        await self._order(member, refit, "agree", orders)

    def _meeting(self, member: Member, route: Route) -> dict[str, Any]:
        return {
            "group": self.names[member.number],
            "host": self.board.host,
            "port": self.board.port,
            "ranks": len(route.senders),
            "size": route.size,
            "timeout_s": self.config.update_timeout_s,
            "handles": self.handles,
        }

    async def send(self, weights: LiveWeights, orders: Sequence[Order], refit: Refit) -> Mapping[int, str]:
        """See `Delivery`. A thread for each server, so that one that hangs is the fault of that one only."""
        own = [order for order in orders if order.server in self.routes]
        outcomes = await asyncio.gather(*(asyncio.to_thread(self._send, weights, order, refit) for order in own))
        self.traffic = sum((traffic for _, traffic in outcomes), Traffic())
        if self.last is not None:
            for route in self.routes.values():
                self.last.keep(route, weights.rank, weights.tensors)
        return {order.server: fault for order, (fault, _) in zip(own, outcomes, strict=True) if fault}

    def _send(self, weights: LiveWeights, order: Order, refit: Refit) -> tuple[str, Traffic]:
        try:
            if order.join:
                self._join(order.server, weights.rank, refit)
            since = None if order.whole else self.last
            return "", self.links[order.server].send(weights.tensors, since, self.config.delta.largest_share)
        except RuntimeError as error:  # torch has one error for all that connections meet
            self._leave(order.server)
            return f"rank {weights.rank} could not send to it: {str(error).splitlines()[0]}", Traffic()

    def _join(self, server: int, rank: int, refit: Refit) -> None:
        self._leave(server)
        store = self.board.connection()
        name = json.loads(store.get(_group_key(refit, server)))
        group = dist.PrefixStore(name, store)
        timeout_s = self.config.update_timeout_s
        self.links[server] = WorkerLink(
            self.routes[server], rank, group, self.board.host, timeout_s, handles=self.handles
        )

    def _leave(self, server: int) -> None:
        if server in self.links:
            self.links.pop(server).close()

    async def take(self, member: Member, order: Order, refit: Refit) -> None:
        """See `Delivery`."""
        workers = self.config.tensor_parallel_size
        if order.join:
            self.board.post(_group_key(refit, member.number), self.names[member.number])
            await self._order(member, refit, "join", [{}] * workers)
        await self._order(member, refit, "receive", [{"whole": order.whole or self.last is None}] * workers)

    async def _order(self, member: Member, refit: Refit, action: str, of_worker: Sequence[dict[str, Any]]) -> None:
        """Raises ServerGone where a worker does not say that it did it."""
        reply = f"reply/{refit.number}/{member.number}/{action}"
        order = {"action": action, "group": self.names[member.number], "reply": reply}
        payloads = [_payload(order | own) for own in of_worker]
        body = {"serialized_named_tensors": payloads, "load_format": LOADER, "flush_cache": False}
        await member.client.succeed("/update_weights_from_tensor", body, timeout_s=self.config.update_timeout_s)
        for rank in range(len(payloads)):
            told = self.board.found(f"{reply}/{rank}")
            fault = "it does not reply" if told is None else told.get("error")
            if fault:
                raise ServerGone(f"worker {rank} did not {action}: {fault}")
            if "received" in told:
                self.received[Worker(member.number, rank)] = int(told["received"])
            self.board.take_down(f"{reply}/{rank}")

    def close(self) -> None:
        for server in list(self.links):
            self._leave(server)


def _group_key(refit: Refit, server: int) -> str:
    return f"group/{refit.number}/{server}"


def _payload(order: dict[str, Any]) -> str:
    """As SGLang unpickles it: named tensors, of which the only one has the order in its bytes."""
    text = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(ORDER, text)])).decode()
