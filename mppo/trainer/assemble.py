"""From a configuration to the parts of a run: process groups, models, optimizers, engine, data, reporter."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from mppo.config import Config
from mppo.errors import ConfigError, ModelError
from mppo.megatron import platform, topology
from mppo.megatron.head import PolicyHead
from mppo.megatron.model import build_chunks
from mppo.megatron.topology import Topology
from mppo.rollout.engine import RolloutEngine, SamplingParams
from mppo.rollout.local import LocalEngine
from mppo.rollout.prompts import PromptSet, load_prompts
from mppo.trainer.checkpoints import Checkpoints
from mppo.trainer.reporter import Reporter, SilentReporter
from mppo.trainer.resolve import Resolved, resolve
from mppo.trainer.roles import ReferenceRole, TrainableRole
from mppo.weights.architectures import architecture_of
from mppo.weights.pretrained import PretrainedModel, open_model, read_hf_config
from mppo.weights.sources import SafetensorsFolder
from mppo.weights.transfer import Exporter, load


@dataclass(frozen=True)
class Parts:
    """All that a Trainer works with."""

    config: Config
    resolved: Resolved
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
    checkpoints: Checkpoints


def assemble(config: Config) -> Parts:
    """Check everything that can be checked without other processes, then join them and build."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    resolved = resolve(config, topology.data_parallel_size(config.parallel, world_size))
    model = open_model(config.model, config.trainer.seed)
    topology.check_layout(config.parallel, model.config)
    _check_lengths(config, model)
    train_prompts, val_prompts = _prompts(config, model)

    place = topology.initialize(config.parallel, config.trainer.seed)
    actor_chunks = _loaded_chunks(config, model, place)
    actor = TrainableRole(actor_chunks, place, config.actor.optim, model.dtype, config.actor.placement)
    critic = reference = None
    if resolved.critic is not None:
        critic_chunks = _critic_chunks(config, model, place)
        critic = TrainableRole(critic_chunks, place, config.critic.optim, model.dtype, config.critic.placement)
    if config.need_reference:
        reference = ReferenceRole(_loaded_chunks(config, model, place), place, config.ref.placement)
    is_first = place.rank == 0
    out_dir, steps = config.trainer.out_dir, config.trainer.total_training_steps
    return Parts(
        config=config,
        resolved=resolved,
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
        checkpoints=Checkpoints(out_dir, config.trainer.resume),
    )


def _check_lengths(config: Config, model: PretrainedModel) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > model.config.max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {longest}, but the model has positions for"
            f" {model.config.max_position_embeddings}; lower one of them"
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


_SAME_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size", "num_experts")


def _critic_chunks(config: Config, model: PretrainedModel, place: Topology) -> list[torch.nn.Module]:
    """The actor's backbone with a zero head, or a reward model with its own head."""
    source, path = model.source, config.critic.path
    if path is not None:
        hf_config = read_hf_config(path, "critic.path")
        sizes = architecture_of(hf_config).model_config(hf_config)
        for name in _SAME_SIZES:
            given = getattr(sizes, name)
            if given != getattr(model.config, name):
                raise ModelError(
                    f"critic.path={path}: its {name} is {given}, that of the actor's model is"
                    f" {getattr(model.config, name)}; the critic must have the actor's sizes"
                )
        source = SafetensorsFolder(path)
    recompute = config.model.recompute
    chunks = build_chunks(model.config, config.parallel, model.dtype, value_head=True, recompute=recompute)
    load(chunks, model.architecture, model.config, source, place, value_head=True, zero_value_head=path is None)
    return chunks


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
