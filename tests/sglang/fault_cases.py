"""Servers that are killed, stopped, refuse, answer nonsense or are slow; on the ranks of a trainer."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mppo.errors import EngineError
from mppo.megatron.collectives import gather_from_all
from mppo.rollout.engines.contract import Completion
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.server import Server
from tests.sglang.faulty_proxy import FaultyProxy
from tests.sglang.flight_cases import asleep, attached, in_flight
from tests.sglang.scene import Scene, signalled, whole


def faults(environment: Path, out_dir: Path) -> dict[str, Any]:
    """One after another, on the same two servers."""
    scene, found = Scene(environment, out_dir), {}
    try:
        found["start"] = scene.update()
        found["expected"] = [a.token_ids for a in scene.answers()]
        first, second = (scene.servers or [None, None])[:2]
        killed = scene.answers(after=scene.at_first(lambda: signalled(first, signal.SIGKILL)()))
        found["killed while answering"] = whole(killed, {0}) and [a.token_ids for a in killed] == found["expected"]
        found["while it starts"] = scene.update()
        found["answers of the other"] = whole(scene.answers(), {scene.version})
        found["once it has started"] = wait_until_ready(scene)
        found["too long a prompt"] = refused(scene)
        found["answers of both"] = whole(scene.answers(), {scene.version})
        stopped = scene.answers(after=scene.at_first(lambda: signalled(second, signal.SIGSTOP)()))
        found["stopped while answering"] = whole(stopped, {scene.version})
        found["while it is stopped"] = scene.update()
        scene.at_first(lambda: signalled(second, signal.SIGCONT)())()
        found["once it goes on"] = scene.update()
        found["killed in mid-refit"] = killed_in_mid_refit(scene, first)
        found["answers after that"] = whole(scene.answers(), {scene.version})
        url = scene.engine.fleet.members[1].client.url
        found |= {mode: in_flight(scene, url, mode) for mode in ("abort", "retract", "in_place")}
        found["asleep"] = asleep(scene, url)
        found |= proxied(scene, second)
        last = scene.answers(after=scene.at_first(lambda: signalled(second, signal.SIGKILL)()))
        found["last"] = [a for a in last if isinstance(a, str)]
        return {name: gather_from_all(value) for name, value in found.items()}
    finally:
        scene.run.rollouts.collector.close()


def refused(scene: Scene) -> str:
    """What is said of a request with which no server can do anything."""
    request = replace(scene.request(0, 20.0), prompt_ids=(5,) * 2000)
    try:
        scene.run.rollouts.collector.loop.run(scene.engine.generate(request))
    except EngineError as error:
        return str(error)
    return ""


def wait_until_ready(scene: Scene) -> dict[int, str]:
    if scene.servers:
        scene.run.rollouts.collector.loop.run(scene.servers[0].ready(120))
    dist.barrier()
    return scene.update()


def killed_in_mid_refit(scene: Scene, server: Server | None) -> dict[int, str]:
    """At the moment at which its worker is told to receive."""
    delivery = scene.engine.refitter.delivery
    order = delivery._order

    async def kill_first(member, refit, action, of_worker):
        if action == "receive" and member.number == 0:
            signalled(server, signal.SIGKILL)()
        await order(member, refit, action, of_worker)

    delivery._order = kill_first
    try:
        return scene.update()
    finally:
        delivery._order = order


def proxied(scene: Scene, server: Server | None) -> dict[str, Any]:
    """A server that misbehaves, beside none that could stand in for it."""
    found: dict[str, Any] = {}
    proxy = FaultyProxy(server.place.url) if server is not None else None
    engine = attached(scene, gather_from_all(proxy and proxy.url)[0])

    def spoil(**faults: Any) -> None:
        dist.barrier()
        for name, value in faults.items():
            if proxy is not None:
                setattr(proxy.faults, name, value)
        dist.barrier()

    found["through a proxy"] = scene.update(engine)
    spoil(refused={"/flush_cache"})
    try:
        scene.update(engine)
    except EngineError as error:
        found["a refused flush"] = str(error)
    spoil(refused=set())
    found["flushed again"] = scene.update(engine)
    spoil(garbage={"/generate": {"text": "hello"}})
    found["garbage"] = scene.answers(engine)
    spoil(garbage={})
    found["no garbage"] = scene.update(engine)
    found["slow"] = slow(scene, engine)
    scene.run.rollouts.collector.loop.run(engine.close())
    return found


def slow(scene: Scene, engine: SglangEngine) -> list[Any]:
    """What is answered by a deadline that a server of one token each half second does not meet."""
    client, loop = engine.fleet.members[0].client, scene.run.rollouts.collector.loop
    dist.barrier()
    if dist.get_rank() == 0:
        loop.run(client.post("/slow_down", {"forward_sleep_time": 0.5}))
    dist.barrier()
    answers = scene.answers(engine, timeout_s=2.0)
    dist.barrier()
    if dist.get_rank() == 0:
        loop.run(client.post("/slow_down", {"forward_sleep_time": None}))
    return [(a.status.name, len(a.token_ids)) if isinstance(a, Completion) else a for a in answers]
