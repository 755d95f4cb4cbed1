"""Requests to SGLang servers, and the trainer's weights to them."""

import asyncio
from itertools import count
from time import monotonic

from mppo.batch.trajectory import Status
from mppo.errors import EngineError, alike_on_every_rank
from mppo.rollout.engines.contract import Completion, Request
from mppo.rollout.engines.sglang.client import ServerGone, ServerRefuses
from mppo.rollout.engines.sglang.deliveries import Refit
from mppo.rollout.engines.sglang.fleet import Fleet, Member
from mppo.rollout.engines.sglang.refitter import Refitter
from mppo.weights.live_weights import LiveWeights

ABORT_S = 10.0
"""Seconds in which a server is to answer with what it has, once a request was aborted."""
LOOK_S = 5.0
"""Seconds between looks at a server that does not answer."""


class SglangEngine:
    """On each rank. The first launches the servers, if they are launched, and speaks for all in an update."""

    def __init__(self, vocab_size: int, fleet: Fleet, refitter: Refitter, rank: int):
        self.vocab_size, self.fleet, self.refitter, self.rank = vocab_size, fleet, refitter, rank
        self.version: int | None = None
        self._requests, self._refits = count(), 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, request: Request) -> Completion:
        """See `RolloutEngine`. A request whose server fails is asked of another, whole, in the time that is left."""
        self._check_ids(request)
        until = monotonic() + request.timeout_s
        while monotonic() < until:
            await self._idle.wait()
            if self.version is None:
                raise EngineError("the SGLang servers have no weights: none came yet, or the last update failed")
            member = self.fleet.take(request.group, self.version)
            try:
                return await self._ask(member, request, self.version, until)
            except ServerRefuses as error:
                raise EngineError(f"{request.uid}: {error}") from error
            except ServerGone as error:
                member.retire(str(error))
            finally:
                self.fleet.give_back(request.group)
        return Completion((), (), (), Status.ABORTED)

    def _check_ids(self, request: Request) -> None:
        """One id outside the vocabulary ends a server, with all that it was doing."""
        ids = (*request.prompt_ids, *request.params.stop_token_ids)
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise EngineError(
                    f"{request.uid}: the prompt has token {token}; the model has {self.vocab_size} tokens"
                )

    async def _ask(self, member: Member, request: Request, version: int, until: float) -> Completion:
        """One answer of this server. Raises ServerGone when it fails, hangs, or answers under unknown weights."""
        name = f"{self.rank}-{next(self._requests)}-{request.uid}"
        asked = asyncio.create_task(member.client.generate(request, name, str(version)))
        member.under_way.add(asked)
        try:
            await self._answered(asked, member, until)
            if not asked.done():
                await member.client.post("/abort_request", {"rid": name}, ABORT_S)
                await asyncio.wait({asked}, timeout=ABORT_S)
            if not asked.done():
                raise ServerGone(f"{member.client.url} does not end a request that was aborted")
            if asked.cancelled():
                raise ServerGone(member.fault)
            completion = asked.result()
        finally:
            asked.cancel()
            member.under_way.discard(asked)
        odd = {span.weight_version for span in completion.spans} - set(range(version, (self.version or version) + 1))
        if odd:
            raise ServerGone(f"{member.client.url} answered with weights of version {odd}, and was given {version}")
        return completion

    async def _answered(self, asked: asyncio.Task, member: Member, until: float) -> None:
        """Wait for it, and look at the server meanwhile. Raises ServerGone for one that is not well."""
        while not asked.done() and (left := until - monotonic()) > 0:
            await asyncio.wait({asked}, timeout=min(LOOK_S, left))
            if not asked.done() and self._idle.is_set():
                await member.see_whether_it_is_well()

    async def update_weights(self, weights: LiveWeights, version: int) -> dict[str, float]:
        """See `RolloutEngine`. Raises EngineError, on every rank, when no server takes them."""
        refit, self._refits = Refit(self._refits, version), self._refits + 1
        self._idle.clear()
        try:
            outcome = await self.refitter.run(weights, refit, self.fleet.members)
        finally:
            self._idle.set()
        for member in self.fleet.members:
            if member.number in outcome.faults:
                member.retire(outcome.faults[member.number])
            else:
                member.version, member.fault = version, ""
        held = len(self.fleet.members) - len(outcome.faults)
        self.version = version if held else None
        if not held:
            with alike_on_every_rank():
                raise EngineError(f"no SGLang server holds the weights of version {version}: {self.fleet.faults()}")
        return {"refit/servers": float(held), **outcome.metrics}

    async def sleep(self) -> None:
        """See `RolloutEngine`."""
        self.version = None
        if self.refitter.conductor is not None:
            await self.refitter.conductor.sleep()

    async def close(self) -> None:
        """End the servers that were launched, and all connections. No rank is back before the first, which ends them:
        whoever launched the ranks may kill the others when one is gone."""
        await asyncio.gather(*(member.client.close() for member in self.fleet.members))
        await self.refitter.close()
