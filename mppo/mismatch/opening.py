"""From a configuration, or the folder of a run, to both sides."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mppo.config import Config
from mppo.errors import ConfigError, alike_on_every_rank, alike_on_machine
from mppo.megatron import topology as process_groups
from mppo.megatron.head import PolicyHead
from mppo.megatron.topology import Topology
from mppo.mismatch.gathering import BothSides
from mppo.mismatch.rescoring import TrainerSide
from mppo.rollout.engines import ENGINES
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.server import free_port
from mppo.rollout.prompts import PromptStream
from mppo.trainer.assemble import build_actor, read_prompts
from mppo.trainer.checkpoints import Checkpoints
from mppo.trainer.manifest import RunDescription
from mppo.trainer.model_checks import check_models
from mppo.trainer.progress import Progress
from mppo.trainer.roles import TrainableRole
from mppo.trainer.run_spec import make_run_spec
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel, open_model


@dataclass(frozen=True)
class Opened:
    """Both sides, what the trainer would ask next, and whose weights these are."""

    sides: BothSides
    stream: PromptStream
    version: int
    weights: str
    """In words."""


def stand_alone() -> None:
    """Without torchrun this process is the only one: give it the variables that torchrun would."""
    if "RANK" in os.environ:
        return
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port("127.0.0.1")}
    os.environ.update({name: str(value) for name, value in alone.items()} | {"MASTER_ADDR": "127.0.0.1"})


def open_trainer(config: Config) -> tuple[TrainerSide, PromptStream]:
    """The actor with its initial weights, and the prompts. Collective; raises what `mppo train` would."""
    world_size = int(os.environ["WORLD_SIZE"])
    with alike_on_machine():
        spec = make_run_spec(config, process_groups.data_parallel_size(config.parallel, world_size))
        model = open_model(config.model, config.trainer.seed)
        check_models(spec, model.config, None)
        train, _ = read_prompts(config, model)
    topology = process_groups.initialize(config.parallel, config.trainer.seed)
    actor = build_actor(spec, model, topology)
    head = PolicyHead(
        model.config.vocab_size, config.rollout.temperature, topology.tp_group, fp32_logits=config.model.fp32_logits
    )
    weights = LiveWeights.of_chunks(actor.chunks, model.architecture, model.config, topology)
    stream = PromptStream(train, config.trainer.seed if config.data.shuffle else None)
    return TrainerSide(spec, model, topology, actor, head, weights), stream


def open_sides(config: Config, run: Path | None = None) -> Opened:
    """Both sides of a configuration; with the folder of a run, under the weights of its newest checkpoint or export.

    Servers are launched, or attached to, as the configuration says; what they write is below
    `trainer.out_dir/mismatch`, and the run's own files are left alone. Collective. Raises ConfigError for another
    engine than SGLang.
    """
    with alike_on_every_rank():
        if config.rollout.engine != "sglang":
            raise ConfigError(
                f"rollout.engine={config.rollout.engine}: mppo mismatch asks SGLang servers; set rollout.engine=sglang"
            )
    config.trainer.out_dir = str(Path(config.trainer.out_dir) / "mismatch")
    config.rollout.sglang.checksum_every = 0  # what does not match is to be explained, not refused
    weights = "initial weights" if run is None else _take_export(config, run)
    trainer, stream = open_trainer(config)
    version = 0
    if run is not None and isinstance(trainer.actor, TrainableRole) and not weights:
        version, weights = _resume(config, run, trainer.actor, trainer.model, trainer.topology)
    engine = ENGINES.get("sglang").fn(config, trainer.model)
    assert isinstance(engine, SglangEngine)
    return Opened(BothSides(trainer, engine, asyncio.Runner()), stream, version, weights)


def _take_export(config: Config, run: Path) -> str:
    """Without a checkpoint: take the newest exported model for the weights. "" where there is a checkpoint.

    Raises ConfigError for a run that left neither.
    """
    with alike_on_every_rank():
        if (run / "checkpoints" / "latest").is_file():
            return ""
        exported = sorted(run.glob("hf_step_*")) + [folder for folder in (run / "hf",) if folder.is_dir()]
        if not exported:
            raise ConfigError(
                f"{run} has neither checkpoints nor an exported model: set trainer.save_freq or trainer.save_hf in runs"
                " that are to be examined, or give the configuration instead"
            )
    config.model.path, config.model.preset, config.model.preset_options = str(exported[-1]), None, {}
    return f"weights of {exported[-1]}"


def _resume(
    config: Config, run: Path, actor: TrainableRole, model: PretrainedModel, topology: Topology
) -> tuple[int, str]:
    """The newest checkpoint's actor; returns its version."""
    progress = Progress()
    description = RunDescription.of(config, {"actor": model}, dist.get_world_size())
    checkpoints = Checkpoints(run / "checkpoints", {"actor": actor, "progress": progress}, description)
    resumed = checkpoints.resume(allow_changes=True)
    assert resumed is not None  # `latest` was seen
    return progress.weight_version, f"weights of {resumed.source}"
