"""Notes that the ranks of a trainer leave each other during a refit, and replies of the workers inside the servers.

A key-value store on the first rank, so that a refit needs no collective of the trainer's: it can run beside a training
step, and who waits for a note has a deadline. It holds text only, and nothing that is read is unpickled.
"""

import asyncio
import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mppo.errors import EngineError
from mppo.megatron import platform
from mppo.megatron.collectives import gather_from_all

WAIT_S = 300.0
"""Seconds in which a rank connects."""


class Board:
    """One on each rank, over a store that the first rank serves on the address by which it reaches the servers."""

    def __init__(self, servers_at: str):
        """Collective. `servers_at` is the host of a server: where that is this machine, nobody else can connect."""
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=WAIT_S)
        served = None
        if self.rank == 0:
            listener = socket.create_server((platform.address_towards(servers_at), 0))
            self.host, self.port = listener.getsockname()
            served = dist.TCPStore(
                self.host,
                self.port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=True,
            )
        self.host, self.port = gather_from_all((self.host, self.port) if served else None)[0]
        self.store: dist.Store = served or self.connection()

    def connection(self) -> dist.Store:
        """One more, for a thread that waits: one connection does one thing at a time."""
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=WAIT_S))

    def post(self, key: str, note: Any) -> None:
        """Leave a note, of what JSON knows. Raises EngineError where the first rank is gone."""
        try:
            self.store.set(key, json.dumps(note))
        except RuntimeError as error:
            raise EngineError("the first rank is gone, and the notes with it") from error

    async def read(self, key: str, timeout_s: float) -> Any:
        """Wait for a note. Raises EngineError when it does not come."""
        return (await self.read_all([key], timeout_s))[0]

    async def read_all(self, keys: Sequence[str], timeout_s: float) -> list[Any]:
        """Wait for all of them, in one thread however many they are: others need threads to send meanwhile.

        Raises EngineError that names those that do not come.
        """
        try:
            store = self.connection()
            await asyncio.to_thread(store.wait, list(keys), timedelta(seconds=timeout_s))
            return [json.loads(store.get(key)) for key in keys]
        except RuntimeError as error:  # torch has one error for all that a store meets
            missing = ", ".join(self._missing(keys)) or "none is missing, but the first rank is gone"
            raise EngineError(f"notes of other ranks that did not come within {timeout_s:g} s: {missing}") from error

    def _missing(self, keys: Sequence[str]) -> list[str]:
        try:
            return [key for key in keys if not self.store.check([key])]
        except RuntimeError:
            return []

    def found(self, key: str) -> Any | None:
        """A note that may be there."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def take_down(self, key: str) -> None:
        self.store.delete_key(key)
