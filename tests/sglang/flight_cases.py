"""Weights that change while answers are written, and servers that sleep while the trainer trains."""

import asyncio
from typing import Any

from mppo.errors import EngineError
from mppo.rollout.engines.contract import Completion, Request
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.launching import sglang_engine
from tests.sglang.cases import change
from tests.sglang.scene import Scene, whole


def in_flight(scene: Scene, url: str, mode: str) -> dict[str, Any]:
    """Answers over which new weights come, each with its spans, and how far log-probs of the tokens that the new
    weights wrote are from those that they have when they read the same ids anew."""
    engine = attached(scene, url, in_flight=mode)
    scene.update(engine)
    requests = [scene.request(number, 60.0) for number in range(8)]

    async def both() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.3)
        change(scene.run, 1, 1.05)
        scene.version += 1
        await engine.update_weights(scene.run.rollouts.weights, scene.version)
        return await asyncio.gather(*tasks)

    loop = scene.run.rollouts.collector.loop
    answers = loop.run(both())
    offs = [loop.run(off(engine, *pair, scene.version)) for pair in zip(requests, answers, strict=True)]
    loop.run(engine.close())
    return {
        "statuses": sorted({answer.status.name for answer in answers}),
        "versions": [[span.weight_version - scene.version for span in answer.spans] for answer in answers],
        "lengths": [len(answer.token_ids) for answer in answers],
        "off": max(max(offs)),
    }


async def off(engine: SglangEngine, request: Request, answer: Completion, version: int) -> list[float]:
    """At each token that `version` wrote."""
    body = {
        "input_ids": [*request.prompt_ids, *answer.token_ids],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": f"scored-{request.uid}-{version}",
    }
    told = (await engine.fleet.members[0].client.post("/generate", body))["meta_info"]["input_token_logprobs"]
    anew = [entry[0] for entry in told][len(request.prompt_ids) :]
    places = [p for span in answer.spans if span.weight_version == version for p in range(span.start, span.stop)]
    return [abs(anew[place] - answer.log_probs[place]) for place in places] or [0.0]


def asleep(scene: Scene, url: str) -> dict[str, Any]:
    """Refits around which a server gives its memory up."""
    engine = attached(scene, url, colocated=True)
    loop, found = scene.run.rollouts.collector.loop, {}
    found["before"] = scene.update(engine)
    loop.run(engine.sleep())
    try:
        loop.run(engine.generate(scene.request(0, 5.0)))
    except EngineError as error:
        found["asked while asleep"] = str(error)
    found["after"] = scene.update(engine)
    found["answers"] = whole(scene.answers(engine), {scene.version})
    loop.run(engine.close())
    return found


def attached(scene: Scene, url: str, **settings: Any) -> SglangEngine:
    """One more engine, to a server that runs."""
    own = scene.small("rollout.sglang.servers=1")
    own.rollout.sglang.urls = [url]
    for name, value in settings.items():
        setattr(own.rollout.sglang, name, value)
    return sglang_engine(own, scene.run.model)
