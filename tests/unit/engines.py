"""A small local engine with weights, and how tests ask it."""

import asyncio
from collections.abc import Iterable

import torch

from mppo.batch.trajectory import TrajectoryId
from mppo.rollout.engines.contract import Completion, Request, SamplingParams
from mppo.rollout.engines.local import LocalEngine
from mppo.weights.live_weights import LiveWeights
from mppo.weights.presets import PRESETS


def small_engine(batch_size: int = 2) -> LocalEngine:
    """A transformers model of two layers over characters, without weights."""
    torch.manual_seed(0)
    hf_config, tokenizer = PRESETS.get("char").fn({})
    return LocalEngine(hf_config, tokenizer, [tokenizer.eos_token_id], torch.float32, torch.device("cpu"), batch_size)


def own_weights(engine: LocalEngine) -> dict[str, torch.Tensor]:
    """Copies of what the engine's model was initialised with."""
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def update(engine: LocalEngine, tensors: dict[str, torch.Tensor], version: int) -> None:
    asyncio.run(engine.update_weights(LiveWeights.of_tensors(tensors), version))


def request(number: int, prompt_ids: Iterable[int], params: SamplingParams, timeout_s: float = 60.0) -> Request:
    uid = TrajectoryId(number, 0)
    return Request(uid, tuple(prompt_ids), params, uid.seed(0), timeout_s)


def ask(engine: LocalEngine, requests: list[Request]) -> list[Completion]:
    """All at the same time."""

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    return asyncio.run(all_of_them())
