"""Weights by way of a folder that the trainer's ranks and all servers see."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from mppo.config import SglangConfig
from mppo.rollout.engines.sglang.deliveries import Order, Refit
from mppo.rollout.engines.sglang.fleet import Member
from mppo.weights.export import export_hf
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel
from mppo.weights.transports.worker_link import Traffic


class Disk:
    """SGLang's own loaders read what `export_hf` writes: for models whose layout in SGLang mppo has no table of."""

    in_session = False

    def __init__(self, config: SglangConfig, model: PretrainedModel, folder: Path):
        self.config, self.model, self.folder, self.traffic = config, model, folder, Traffic()

    async def prepare(self, weights: LiveWeights, refit: Refit) -> None:
        await asyncio.to_thread(export_hf, weights, self.model, self.folder)

    async def agree(self, member: Member, refit: Refit) -> None:
        """Nothing is agreed: what a loader does not find, it refuses."""

    async def send(self, weights: LiveWeights, orders: Sequence[Order], refit: Refit) -> Mapping[int, str]:
        return {}

    async def take(self, member: Member, order: Order, refit: Refit) -> None:
        body = {"model_path": str(self.folder.resolve()), "load_format": "auto", "flush_cache": False}
        await member.client.succeed("/update_weights_from_disk", body, timeout_s=self.config.update_timeout_s)

    def close(self) -> None:
        """The last folder stays: it is what the servers hold."""
