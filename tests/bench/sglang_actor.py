"""What benchmarks of SGLang share: weights to give it, and a server that has started."""

import torch

from mppo.config import Config
from mppo.megatron.model import build_chunks
from mppo.megatron.topology import Topology
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.weights.live_weights import LiveWeights
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel


def actor_weights(config: Config, model: PretrainedModel, place: Topology) -> LiveWeights:
    """Collective: those of a model without an optimizer."""
    chunks = build_chunks(model.config, config.parallel, getattr(torch, config.model.dtype))
    load(chunks, model.architecture, model.config, model.source, place)
    return LiveWeights.of_chunks(chunks, model.architecture, model.config, place)


async def servers_are_ready(engine: SglangEngine) -> None:
    """Until launched servers answer, so that this is no part of a first refit."""
    if engine.refitter.conductor is not None:
        for server in engine.refitter.conductor.servers:
            await server.ready(engine.refitter.config.start_timeout_s)
