"""The first rank's part in a refit: what is said to each server, in order, and what becomes of it."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_fixed

from mppo.config import SglangConfig
from mppo.errors import ConfigError
from mppo.rollout.engines.sglang.client import ServerGone, SglangClient
from mppo.rollout.engines.sglang.deliveries import Delivery, Order, Refit
from mppo.rollout.engines.sglang.fleet import Member
from mppo.rollout.engines.sglang.server import Server

CACHE, WEIGHTS = "kv_cache", "weights"
"""Tags of memory that a server gives up and takes again."""
ENDING_S = 2.0
"""Seconds that a process which was killed may take to be gone."""
FLUSH_S = 10.0
"""Seconds in which a server is to empty its prefix cache, once it is paused."""
PROMPT = list(range(1, 33))
"""Tokens by which it is seen what a server's prefix cache is named by."""


@dataclass
class Holding:
    """What a server has, all connections being made."""

    version: int
    deltas: int = 0
    """Since it took whole weights."""


class Conductor:
    """Pause, update, verify, continue: a server that fails anywhere is asked nothing until a refit succeeds on it."""

    def __init__(self, config: SglangConfig, members: Sequence[Member], servers: Sequence[Server], delivery: Delivery):
        """`servers` are those that are launched: one for each member, or none."""
        self.config, self.members, self.servers, self.delivery = config, members, servers, delivery
        self.holds: dict[int, Holding] = {}
        """By server; none of one that failed."""
        self.deltas: dict[int, int] = {}
        """By server: those since whole weights, once this refit is done."""
        self.asleep: dict[int, set[str]] = {}
        """By server: tags of memory that it has given up."""

    async def sleep(self) -> None:
        """Of every server that holds weights: give up the memory of the cache and of the weights, which are lost."""
        awake = [member for member in self.members if member.number in self.holds]
        outcomes = await asyncio.gather(*(self._release(member) for member in awake))
        for member, fault in zip(awake, outcomes, strict=True):
            if fault:
                member.retire(fault)
                del self.holds[member.number]
            else:
                self.asleep[member.number] = {CACHE, WEIGHTS}

    async def _wake(self, member: Member, tag: str) -> None:
        """Weights first, so that new ones find room; the cache when they are there."""
        lost = self.asleep.get(member.number, set())
        if tag in lost:
            await member.client.post("/resume_memory_occupation", {"tags": [tag]})
            lost.remove(tag)
        if not lost:
            self.asleep.pop(member.number, None)

    @staticmethod
    async def _release(member: Member) -> str:
        try:
            await _flush(member.client)
            await member.client.post("/release_memory_occupation", {"tags": [CACHE, WEIGHTS]})
        except ServerGone as error:
            return str(error)
        return ""

    async def order(self, refit: Refit, reported: Mapping[int, str]) -> tuple[list[Order], dict[int, str]]:
        """Bring every server that lives to where it can take weights; says what each is to get, and what is wrong with
        the others. `reported` is what other ranks met while they asked it."""
        for number in reported:
            self.holds.pop(number, None)
        await self._relaunch(reported)
        found = await asyncio.gather(*(self._ready(member, refit) for member in self.members))
        orders = [order for order in found if isinstance(order, Order)]
        return orders, {m.number: o for m, o in zip(self.members, found, strict=True) if isinstance(o, str)}

    async def _relaunch(self, reported: Mapping[int, str]) -> None:
        """Servers that ended are started again. They are waited for only where no other is left."""
        for server in self.servers:
            is_failing = server.is_ready and server.number in reported
            if await server.has_ended(ENDING_S if is_failing else 0.0):
                server.start()
                self.holds.pop(server.number, None)
                self.asleep.pop(server.number, None)
        starting = [server for server in self.servers if not server.is_ready]
        if starting and len(starting) == len(self.servers):
            await self._wait_for(starting)
        else:
            await asyncio.gather(*(server.look() for server in starting))

    async def _wait_for(self, servers: Sequence[Server]) -> None:
        """Raises EngineError when none comes to answer."""
        console, since = Console(stderr=True), monotonic()
        console.print(f"SGLang: {len(servers)} server(s) start; their logs are in {servers[0].log.parent}")
        with console.status("waiting for SGLang servers to answer"):
            waited = (server.ready(self.config.start_timeout_s) for server in servers)
            outcomes = await asyncio.gather(*waited, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(errors) == len(servers):
            raise errors[0]
        console.print(f"SGLang: {len(servers) - len(errors)} answer(s) after {monotonic() - since:.0f} s")

    async def _ready(self, member: Member, refit: Refit) -> Order | str:
        """Paused, and told of what is to come; or what is wrong with it."""
        if self.servers and not self.servers[member.number].is_ready:
            return "it is starting"
        client, number = member.client, member.number
        try:
            held = self.holds.pop(number, None)
            if held is not None and await client.weight_version() != str(held.version):
                held = None  # somebody started it again: it holds other weights, and knows no connections
            await self._wake(member, WEIGHTS)
            await client.post("/pause_generation", {"mode": self.config.in_flight})
            if self.delivery.in_session:
                await self._begin(client)
            if held is None:
                await self.delivery.agree(member, refit)
        except ServerGone as error:
            return str(error)
        whole = held is None or number in self.asleep or self._is_due(held)
        self.deltas[number] = 0 if whole or held is None else held.deltas + 1
        return Order(number, whole, join=held is None)

    def _is_due(self, held: Holding) -> bool:
        """Whether a server that has the version before is sent whole weights nevertheless."""
        every = self.config.delta.full_every
        return self.config.transport != "delta" or bool(every and held.deltas >= every)

    @staticmethod
    async def _begin(client: SglangClient) -> None:
        """A session that a failed refit left open is closed first."""
        try:
            await client.succeed("/begin_weight_update", {"selector": "target"})
        except ServerGone as error:
            if "already open" not in str(error):
                raise
            await client.succeed("/end_weight_update")
            await client.succeed("/begin_weight_update", {"selector": "target"})

    async def conduct(self, order: Order, refit: Refit) -> str:
        """Weights, cache, version; returns what went wrong, "" for nothing. The server stays paused."""
        member = self.members[order.server]
        client = member.client
        try:
            await self.delivery.take(member, order, refit)
            if self.delivery.in_session:
                await client.succeed("/end_weight_update")
            if self.config.in_flight != "in_place":
                await _flush(client)
            version = {"new_version": str(refit.version), "abort_all_requests": False}
            await client.succeed("/update_weight_version", version)
            told = await client.weight_version()
        except ServerGone as error:
            return str(error)
        return "" if told == str(refit.version) else f"it says that it holds version {told}"

    async def compare(self, order: Order, expected: Mapping[str, str]) -> str:
        """What the workers hold against `{"<tp rank>/<parameter>": checksum}`; returns what differs."""
        client = self.members[order.server].client
        try:
            answer = await client.post("/weights_checker", {"action": "checksum"}, self.config.update_timeout_s)
            found = {
                f"{worker['parallelism_info'][0]['tp_rank']}/{name}": value
                for worker in answer["ranks"]
                for name, value in worker["checksums"].items()
            }
        except ServerGone as error:
            return str(error)
        except (KeyError, TypeError, IndexError) as error:
            return f"its checksums cannot be read: {type(error).__name__}: {error}"
        odd = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if not odd:
            return ""
        worker, name = odd[0].split("/", 1)
        return f"its worker {worker} does not hold {name} as the plan says; {len(odd)} of {len(expected)} differ"

    async def resume(self, order: Order, refit: Refit) -> str:
        """It holds the version, proved; it may be asked again."""
        client, is_new = self.members[order.server].client, order.join
        try:
            await self._wake(self.members[order.server], CACHE)
            await client.post("/continue_generation", {"torch_empty_cache": False})
            if is_new and self.config.in_flight == "in_place" and not await _names_cache_by_salt(client):
                raise ConfigError(
                    f"rollout.sglang.in_flight=in_place: {client.url} would answer from keys and values of old weights,"
                    " since its prefix cache does not heed cache_salt; use retract or abort"
                )
        except ServerGone as error:
            return str(error)
        self.holds[order.server] = Holding(refit.version, self.deltas[order.server])
        return ""


async def _flush(client: SglangClient) -> None:
    """Raises ServerGone where a server does not empty its cache: answers over old keys and values would follow."""
    try:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(ServerGone), stop=stop_after_delay(FLUSH_S), wait=wait_fixed(0.5)
        ):
            with attempt:
                await client.post("/flush_cache")
    except RetryError as error:
        raise ServerGone(f"it does not flush its prefix cache: {error.last_attempt.exception()}") from error


async def _names_cache_by_salt(client: SglangClient) -> bool:
    """Whether what was read under one salt is not used under another."""

    async def cached(salt: str) -> int:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "cache_salt": salt}
        answer = await client.post("/generate", body)
        try:
            return int(answer["meta_info"]["cached_tokens"])
        except (KeyError, TypeError) as error:
            raise ServerGone(f"it does not say what it took from its cache: {str(answer)[:200]}") from error

    await cached(f"mppo-{secrets.token_hex(8)}")
    return await cached(f"mppo-{secrets.token_hex(8)}") == 0
