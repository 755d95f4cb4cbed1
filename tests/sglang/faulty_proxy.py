"""Stands between the engine and a real server, and spoils what it is told to spoil."""

import asyncio
import threading
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web


@dataclass
class Faults:
    """What goes wrong; none of it does at first."""

    refused: set[str] = field(default_factory=set)
    """Paths that are answered with 400."""
    garbage: dict[str, object] = field(default_factory=dict)
    """By path: the JSON that is answered instead of the server's."""


class FaultyProxy:
    """On a thread of its own, with a URL of its own."""

    def __init__(self, target: str):
        self.target, self.faults, self.url = target, Faults(), ""
        self.asked: list[str] = []
        """Paths, in order."""
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        threading.Thread(target=self._serve, args=(started,), daemon=True).start()
        assert started.wait(30)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        started.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _pass(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path in self.faults.refused:
            return web.Response(status=400, text="refused, for a test")
        if request.path in self.faults.garbage:
            return web.json_response(self.faults.garbage[request.path])
        body, kind = await request.read(), {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.target + request.path, data=body, headers=kind) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
