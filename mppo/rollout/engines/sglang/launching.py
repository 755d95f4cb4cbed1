"""`rollout.engine=sglang`: servers that are launched or attached to, and the engine that asks them."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mppo.config import Config, SglangConfig
from mppo.errors import ConfigError
from mppo.megatron.collectives import fail_together, gather_from_all
from mppo.rollout.engines.contract import ENGINES
from mppo.rollout.engines.sglang.board import Board
from mppo.rollout.engines.sglang.broadcast_delivery import Broadcast
from mppo.rollout.engines.sglang.client import SglangClient
from mppo.rollout.engines.sglang.conductor import Conductor
from mppo.rollout.engines.sglang.deliveries import Delivery
from mppo.rollout.engines.sglang.disk_delivery import Disk
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.fleet import Fleet, Member
from mppo.rollout.engines.sglang.refitter import Refitter
from mppo.rollout.engines.sglang.server import Place, Server, free_port
from mppo.rollout.engines.sglang.shard_delivery import Shards
from mppo.weights.checksums import ExpectedChecksums
from mppo.weights.folder_files import write_folder_files
from mppo.weights.pretrained import PretrainedModel
from mppo.weights.sglang_layout import sglang_layout
from mppo.weights.transfer_plan import Layout


@ENGINES.register("sglang")
def sglang_engine(config: Config, model: PretrainedModel) -> SglangEngine:
    """Collective. The first rank launches servers with weights drawn at random, unless it attaches to `urls`; the first
    update gives them the trainer's."""
    settings, folder = config.rollout.sglang, Path(config.trainer.out_dir) / "sglang"
    dtype = config.rollout.dtype or config.model.dtype
    with fail_together():
        _check_machines(settings)
        key = _api_key(settings)
        target = _target(settings, model, dtype)
        servers = _launched(settings, model, folder, dtype) if dist.get_rank() == 0 and not settings.urls else []
    urls = settings.urls or gather_from_all([server.place.url for server in servers])[0]
    members = [Member(number, SglangClient(url, key, settings.health_timeout_s)) for number, url in enumerate(urls)]
    board = Board(members[0].client.host)
    delivery: Delivery
    if settings.transport == "disk":
        delivery = Disk(settings, model, folder / "weights")
    elif settings.transport == "broadcast":
        delivery = Broadcast(settings, board, getattr(torch, dtype))
    else:
        delivery = Shards(settings, board, target, delta=settings.transport == "delta")
    checks = ExpectedChecksums(target, dist.get_world_size())
    conductor = Conductor(settings, members, servers, delivery) if dist.get_rank() == 0 else None
    refitter = Refitter(settings, board, delivery, checks, conductor)
    return SglangEngine(model.config.vocab_size, Fleet(members), refitter, dist.get_rank())


def _target(settings: SglangConfig, model: PretrainedModel, dtype: str) -> Layout:
    servers = range(len(settings.urls) or settings.servers)
    tp, ep = settings.tensor_parallel_size, settings.expert_parallel_size
    return sglang_layout(model.architecture, model.config, tp, getattr(torch, dtype), ep=ep, servers=servers)


def _check_machines(settings: SglangConfig) -> None:
    """Raises ConfigError where some ranks could not reach servers, or their memory."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return
    if not settings.urls:
        raise ConfigError(
            "mppo launches SGLang servers for the ranks of one machine; with several start them yourself"
            " (launch/README.md) and give rollout.sglang.urls and rollout.sglang.api_key_variable"
        )
    if settings.colocated and settings.transport != "disk":
        raise ConfigError(
            "rollout.sglang.colocated hands weights over within one machine; with several use"
            " rollout.sglang.transport=disk, or GPUs of their own for the servers"
        )


def _launched(settings: SglangConfig, model: PretrainedModel, folder: Path, dtype: str) -> Sequence[Server]:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    write_folder_files(model, folder / "model")
    places = [Place("127.0.0.1", free_port("127.0.0.1")) for _ in range(settings.servers)]
    return [
        Server(settings, number, folder / "model", dtype, place, folder / f"server_{number}.log")
        for number, place in enumerate(places)
    ]


def _api_key(settings: SglangConfig) -> str | None:
    """Raises ConfigError for a variable that is not set."""
    if settings.api_key_variable is None:
        return None
    if not os.environ.get(settings.api_key_variable):
        raise ConfigError(f"rollout.sglang.api_key_variable={settings.api_key_variable}: that variable is not set")
    return os.environ[settings.api_key_variable]
