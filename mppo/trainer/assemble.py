"""From a configuration to the parts of a run: process groups, models, optimizers, engine, data, reporter."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from mppo.config import Config
from mppo.megatron import platform, topology
from mppo.megatron.collectives import fail_together
from mppo.megatron.head import PolicyHead
from mppo.megatron.model import build_chunks
from mppo.megatron.topology import Topology
from mppo.rollout.engines.contract import RolloutEngine, SamplingParams
from mppo.rollout.engines.local import LocalEngine
from mppo.rollout.prompts import PromptSet, load_prompts
from mppo.trainer.manifest import RunDescription
from mppo.trainer.model_checks import check_models
from mppo.trainer.reporter import Reporter, SilentReporter
from mppo.trainer.roles import ReferenceRole, TrainableRole
from mppo.trainer.run_lock import RunLock
from mppo.trainer.run_spec import RunSpec, make_run_spec
from mppo.weights.pretrained import PretrainedModel, open_critic, open_model
from mppo.weights.transfer import Exporter, load


@dataclass(frozen=True)
class Parts:
    """All that a Trainer works with."""

    config: Config
    spec: RunSpec
    topology: Topology
    model: PretrainedModel
    head: PolicyHead
    actor: TrainableRole
    critic: TrainableRole | None
    reference: ReferenceRole | None
    exporter: Exporter
    engine: RolloutEngine
    sampling: SamplingParams
    greedy: SamplingParams
    train_prompts: PromptSet
    val_prompts: PromptSet | None
    reporter: SilentReporter
    run: RunDescription
    """What checkpoints are marked with."""
    lock: RunLock | None
    """On the first rank."""


def assemble(config: Config) -> Parts:
    """Check everything that can be checked without other processes, then join them and build."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    spec = make_run_spec(config, topology.data_parallel_size(config.parallel, world_size))
    model = open_model(config.model, config.trainer.seed)
    critic_model = None if spec.critic is None else open_critic(config.critic, model)
    check_models(spec, model.config, None if critic_model is None else critic_model.config)
    train_prompts, val_prompts = _prompts(config, model)

    place = topology.initialize(config.parallel, config.trainer.seed)
    with fail_together():
        lock = RunLock(config.trainer.out_dir) if place.rank == 0 else None
    models = {"actor": model} if critic_model is None else {"actor": model, "critic": critic_model}
    actor_chunks = _loaded_chunks(config, model, place)
    actor = TrainableRole(actor_chunks, place, config.actor.optim, model.dtype, config.actor.placement)
    critic = None if critic_model is None else _critic(spec, critic_model, place)
    reference = None
    if config.need_reference:
        reference = ReferenceRole(_loaded_chunks(config, model, place), place, config.ref.placement)
    is_first = place.rank == 0
    out_dir, steps = config.trainer.out_dir, config.trainer.total_training_steps
    return Parts(
        config=config,
        spec=spec,
        topology=place,
        model=model,
        head=PolicyHead(model.config.vocab_size, config.rollout.temperature, place.tp_group),
        actor=actor,
        critic=critic,
        reference=reference,
        exporter=Exporter(actor.chunks, model.architecture, model.config, place),
        engine=_engine(config, model),
        sampling=_sampling(config, config.rollout.temperature),
        greedy=_sampling(config, 0.0),
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        reporter=Reporter(out_dir, steps) if is_first else SilentReporter(),
        run=RunDescription.of(config, models, world_size),
        lock=lock,
    )


def _prompts(config: Config, model: PretrainedModel) -> tuple[PromptSet, PromptSet | None]:
    def read(source: Any, where: str) -> PromptSet:
        return load_prompts(source, where, config.data, model.tokenizer, model.config.vocab_size)

    val = config.data.val
    return read(config.data.train, "data.train"), read(val, "data.val") if val.given else None


def _loaded_chunks(config: Config, model: PretrainedModel, place: Topology) -> list[torch.nn.Module]:
    chunks = build_chunks(model.config, config.parallel, model.dtype, recompute=config.model.recompute)
    load(chunks, model.architecture, model.config, model.source, place)
    return chunks


def _critic(spec: RunSpec, model: PretrainedModel, place: Topology) -> TrainableRole:
    """The actor's backbone with a zero head, or a reward model with its own head."""
    config, parallel = spec.config.critic, spec.critic_parallel
    place = place.of_role(parallel)
    recompute = config.recompute or spec.config.model.recompute
    chunks = build_chunks(model.config, parallel, model.dtype, value_head=True, recompute=recompute)
    head = {"value_head": True, "zero_value_head": config.path is None}
    load(chunks, model.architecture, model.config, model.source, place, **head)
    return TrainableRole(chunks, place, config.optim, model.dtype, config.placement)


def _engine(config: Config, model: PretrainedModel) -> RolloutEngine:
    dtype = getattr(torch, config.rollout.dtype or config.model.dtype)
    return LocalEngine(model.hf_config, model.tokenizer, dtype, platform.device(), config.rollout.batch_size)


def _sampling(config: Config, temperature: float) -> SamplingParams:
    rollout = config.rollout
    greedy = temperature == 0
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )
