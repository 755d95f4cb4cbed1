"""The servers that answer: which is asked, and which is asked no more."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from mppo.errors import EngineError
from mppo.rollout.engines.sglang.client import SglangClient

CHECK_EVERY_S = 10.0
"""Seconds without an answer after which a server is asked whether it is well."""


@dataclass(eq=False)
class Member:
    """A server, as this rank sees it."""

    number: int
    client: SglangClient
    version: int | None = None
    """Of the weights that it was proved to hold; None: it is asked nothing."""
    fault: str = ""
    """Why it is out."""
    under_way: set[asyncio.Task] = field(default_factory=set)
    """Requests of this rank."""
    checked: float = 0.0
    """When it was last found well, on the monotonic clock."""
    check: asyncio.Task | None = None

    def retire(self, fault: str) -> None:
        """Ask it nothing until an update succeeds; what it was asked is asked elsewhere."""
        self.version, self.fault = None, fault
        for task in self.under_way:
            task.cancel()

    async def see_whether_it_is_well(self) -> None:
        """Those who wait for it share a check. Raises ServerGone."""
        if monotonic() - self.checked < CHECK_EVERY_S:
            return
        if self.check is None or self.check.done():
            self.check = asyncio.create_task(self.client.get("/health"))
        await asyncio.shield(self.check)
        self.checked = monotonic()


@dataclass(eq=False)
class Fleet:
    """Requests of one group go to one server while any of them is under way, since they share a prompt; a new group
    goes to the server with the fewest."""

    members: Sequence[Member]
    _of_group: dict[int, Member] = field(default_factory=dict)
    _in_group: Counter[int] = field(default_factory=Counter)

    def take(self, group: int, version: int) -> Member:
        """A server with these weights, for one request. Raises EngineError, naming what happened to each, for none."""
        member = self._of_group.get(group)
        if member is None or member.version != version:
            able = [m for m in self.members if m.version == version]
            if not able:
                raise EngineError(
                    f"no SGLang server is left that holds the weights of version {version}: {self.faults()}"
                )
            member = self._of_group[group] = min(able, key=lambda m: len(m.under_way))
        self._in_group[group] += 1
        return member

    def give_back(self, group: int) -> None:
        """The request is answered, or given up."""
        self._in_group[group] -= 1
        if not self._in_group[group]:
            del self._in_group[group]
            self._of_group.pop(group, None)

    def faults(self) -> str:
        """What is known of each server that is out."""
        return "; ".join(f"{m.client.url}: {m.fault or 'no weights yet'}" for m in self.members if m.version is None)
