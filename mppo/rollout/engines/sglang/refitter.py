"""One refit on all ranks: the first rank's orders, everybody's part, and what came of it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mppo.config import SglangConfig
from mppo.errors import EngineError, MppoError, RankError, alike_on_every_rank
from mppo.rollout.engines.sglang.board import Board
from mppo.rollout.engines.sglang.conductor import Conductor
from mppo.rollout.engines.sglang.deliveries import Delivery, Order, Refit
from mppo.rollout.engines.sglang.fleet import Member
from mppo.weights.checksums import ExpectedChecksums
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transports.worker_link import Traffic

CLOSING_S = 20.0
"""Seconds in which the first rank ends servers."""
LEAVING_S = 2.0
"""Seconds in which the other ranks are to say that they know."""


@dataclass(frozen=True)
class Outcome:
    """The same on every rank."""

    faults: dict[int, str]
    """What went wrong, by server; the others hold the version, proved."""
    metrics: dict[str, float]


class Refitter:
    """On each rank. All that ranks tell each other goes over the board."""

    def __init__(
        self,
        config: SglangConfig,
        board: Board,
        delivery: Delivery,
        checks: ExpectedChecksums,
        conductor: Conductor | None,
    ):
        """`conductor` is there on the first rank."""
        self.config, self.board, self.delivery = config, board, delivery
        self.checks, self.conductor = checks, conductor

    async def run(self, weights: LiveWeights, refit: Refit, members: Sequence[Member]) -> Outcome:
        """Raises EngineError, on every rank, where the first rank could not go on."""
        await self.delivery.prepare(weights, refit)
        reports = {member.number: member.fault for member in members if member.version is None and member.fault}
        self.board.post(f"{refit.number}/report/{self.board.rank}", reports)
        lead = [self._lead(refit)] if self.conductor is not None else []
        found, *_ = await asyncio.gather(self._follow(weights, refit), *lead)
        return found

    async def close(self) -> None:
        """The servers end; the other ranks wait for that, and the first until they know."""
        self.delivery.close()
        if self.conductor is None:
            with suppress(EngineError):  # the first rank may have ended otherwise
                await self.board.read("closed", CLOSING_S)
                self.board.post(f"closed/{self.board.rank}", {})
            return
        await asyncio.gather(*(server.close() for server in self.conductor.servers))
        self.board.post("closed", {})
        with suppress(EngineError):
            await self.board.read_all([f"closed/{rank}" for rank in range(1, self.board.ranks)], LEAVING_S)

    async def _follow(self, weights: LiveWeights, refit: Refit) -> Outcome:
        """What every rank does, the first as well."""
        told = await self._said(f"{refit.number}/orders")
        orders = [Order(**order) for order in told["orders"]]
        self.board.post(
            f"{refit.number}/part/{self.board.rank}", await self._part(weights, refit, orders, told["check"])
        )
        told = await self._said(f"{refit.number}/outcome")
        return Outcome({int(number): fault for number, fault in told["faults"].items()}, told["metrics"])

    async def _part(self, weights: LiveWeights, refit: Refit, orders: list[Order], check: bool) -> dict[str, Any]:
        """This rank's; where it fails, the servers that miss it are out."""
        part: dict[str, Any] = {"faults": {}, "checksums": {}, "traffic": vars(Traffic())}
        try:
            part["faults"] = dict(await self.delivery.send(weights, orders, refit))
            part["traffic"] = vars(self.delivery.traffic)
            if check:
                part["checksums"] = await asyncio.to_thread(self.checks.find, weights)
        except Exception as error:
            part["faults"] = {order.server: f"rank {self.board.rank} failed: {error!r}" for order in orders}
        return part

    async def _said(self, key: str) -> Any:
        """A note of the first rank."""
        note = await self.board.read(key, self._patience)
        if "error" in note:
            with alike_on_every_rank():
                raise EngineError(note["error"])
        return note

    @property
    def _patience(self) -> float:
        """Seconds that a rank waits for another, which may wait for servers."""
        return self.config.start_timeout_s + 3 * self.config.update_timeout_s

    async def _lead(self, refit: Refit) -> None:
        """The first rank's part; whatever ends it, the others are told."""
        number, key = refit.number, f"{refit.number}/orders"
        try:
            reported = await self._gathered(f"{number}/report")
            seen = {int(n): fault for report in reported for n, fault in report.items()}
            orders, faults = await self.conductor.order(refit, seen)
            check = bool(self.config.checksum_every) and number % self.config.checksum_every == 0
            self.board.post(key, {"orders": [vars(order) for order in orders], "check": check})
            key = f"{number}/outcome"
            conducted = await asyncio.gather(*(self.conductor.conduct(order, refit) for order in orders))
            met = [{o.server: fault for o, fault in zip(orders, conducted, strict=True) if fault}]
            parts = await self._gathered(f"{number}/part")
            met += [{int(n): fault for n, fault in part["faults"].items()} for part in parts]
            faults |= _joined(met)
            expected = {name: value for part in parts for name, value in part["checksums"].items()}
            able = [order for order in orders if order.server not in faults]
            ended = await asyncio.gather(*(self._end(order, refit, expected) for order in able))
            faults |= {order.server: fault for order, fault in zip(able, ended, strict=True) if fault}
            self.board.post(key, {"faults": faults, "metrics": _metrics(parts)})
            self._clear(number - 1)
        except Exception as error:
            told = error if isinstance(error, MppoError) else RankError.of(error, self.board.rank)
            self.board.post(key, {"error": str(told)})

    async def _end(self, order: Order, refit: Refit, expected: Mapping[str, str]) -> str:
        fault = await self.conductor.compare(order, expected) if expected else ""
        return fault or await self.conductor.resume(order, refit)

    async def _gathered(self, key: str) -> list[Any]:
        """What every rank has posted."""
        keys = [f"{key}/{rank}" for rank in range(self.board.ranks)]
        notes = await self.board.read_all(keys, self._patience)
        for one in keys:
            self.board.take_down(one)
        return notes

    def _clear(self, number: int) -> None:
        """Of a refit that all ranks have left behind: they have posted their part in the one after it."""
        for key in ("orders", "outcome"):
            self.board.take_down(f"{number}/{key}")


def _joined(met: Sequence[Mapping[int, str]]) -> dict[int, str]:
    """All that was met of each server."""
    found: dict[int, list[str]] = {}
    for faults in met:
        for number, fault in faults.items():
            found.setdefault(number, []).append(fault)
    return {number: "; ".join(dict.fromkeys(told)) for number, told in found.items()}


def _metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of all ranks together."""
    traffic = sum((Traffic(**part["traffic"]) for part in parts), Traffic())
    found = {"refit/bytes": float(traffic.bytes)}
    return found | ({"refit/sent_share": traffic.changed / traffic.entries} if traffic.entries else {})
