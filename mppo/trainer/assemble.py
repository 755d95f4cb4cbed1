"""From a configuration to a run: process groups, models, optimizers, engine, data, records."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from mppo.algorithm.group_selection import has_signal
from mppo.config import Config, PromptSource, RolloutConfig, ValidationSamplingConfig
from mppo.errors import alike_on_machine
from mppo.megatron import topology as process_groups
from mppo.megatron.collectives import fail_together, gather_from_all
from mppo.megatron.head import PolicyHead
from mppo.megatron.model import build_chunks
from mppo.megatron.topology import Topology
from mppo.rollout.agents.single_turn import single_turn
from mppo.rollout.answer_text import AnswerText
from mppo.rollout.buffer import Buffer
from mppo.rollout.collector import Asking, Collector
from mppo.rollout.engines import ENGINES
from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.prompt_group import Group
from mppo.rollout.prompts import PromptSet, PromptStream, load_prompts
from mppo.rollout.reward_workers import RewardWorkers
from mppo.trainer import run_folder
from mppo.trainer.manifest import RunDescription
from mppo.trainer.model_checks import check_models
from mppo.trainer.reporter import Reporter, SilentReporter
from mppo.trainer.roles import ReferenceRole, TrainableRole
from mppo.trainer.run import Records, Roles, Rollouts, Run
from mppo.trainer.run_lock import RunLock
from mppo.trainer.run_spec import RunSpec, make_run_spec
from mppo.weights.live_weights import LiveWeights
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel, open_critic, open_model


def assemble(config: Config) -> Run:
    """Check everything that can be checked without other processes, then join them and build."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    with alike_on_machine():
        spec = make_run_spec(config, process_groups.data_parallel_size(config.parallel, world_size))
        model = open_model(config.model, config.trainer.seed)
        critic_model = None if spec.critic is None else open_critic(config.critic, model)
        check_models(spec, model.config, None if critic_model is None else critic_model.config)
        train, held_out = read_prompts(config, model)

    topology = process_groups.initialize(config.parallel, config.trainer.seed)
    kept_records = records(config, {"actor": model, "critic": critic_model}, topology)
    roles = _roles(spec, model, critic_model, topology)
    return Run(
        spec=spec,
        topology=topology,
        model=model,
        roles=roles,
        rollouts=_rollouts(spec, model, roles.actor, train, held_out, topology),
        records=kept_records,
        data=in_words(train, held_out),
    )


def read_prompts(config: Config, model: PretrainedModel) -> tuple[PromptSet, PromptSet | None]:
    """Those to train on, and where they are given those that are held out."""
    sources = list(config.reward.sources)

    def read(source: PromptSource, where: str) -> PromptSet:
        return load_prompts(source, where, config.data, model.tokenizer, model.config.vocab_size, sources)

    val = config.data.val
    return read(config.data.train, "data.train"), read(val, "data.val") if val.given else None


def in_words(train: PromptSet, held_out: PromptSet | None) -> str:
    """How many prompts there are, and how many were skipped."""
    return f"data.train: {train}" + (f"; data.val: {held_out}" if held_out is not None else "")


def _roles(spec: RunSpec, model: PretrainedModel, critic: PretrainedModel | None, topology: Topology) -> Roles:
    config = spec.config
    actor, reference = build_actor(spec, model, topology), None
    critic_role = None if critic is None else _critic(spec, critic, topology)
    if config.need_reference:
        reference = ReferenceRole(_loaded_chunks(config, model, topology), topology, config.ref.placement)
    head = PolicyHead(
        model.config.vocab_size, config.rollout.temperature, topology.tp_group, fp32_logits=config.model.fp32_logits
    )
    return Roles(actor, critic_role, reference, head)


def build_actor(spec: RunSpec, model: PretrainedModel, topology: Topology) -> TrainableRole:
    """The actor with its initial weights."""
    config = spec.config.actor
    chunks = _loaded_chunks(spec.config, model, topology)
    return TrainableRole(chunks, topology, config.optim, model.dtype, config.placement)


def _loaded_chunks(config: Config, model: PretrainedModel, topology: Topology) -> list[torch.nn.Module]:
    source = config.model
    chunks = build_chunks(
        model.config, config.parallel, model.dtype, recompute=source.recompute, passed=source.megatron
    )
    load(chunks, model.architecture, model.config, model.source, topology)
    return chunks


def _critic(spec: RunSpec, model: PretrainedModel, topology: Topology) -> TrainableRole:
    """The actor's backbone with a zero head, or a reward model with its own head."""
    config, parallel = spec.config.critic, spec.critic_parallel
    topology = topology.of_role(parallel)
    recompute = config.recompute or spec.config.model.recompute
    passed = spec.config.model.megatron
    chunks = build_chunks(model.config, parallel, model.dtype, value_head=True, recompute=recompute, passed=passed)
    head = {"value_head": True, "zero_value_head": config.path is None}
    load(chunks, model.architecture, model.config, model.source, topology, **head)
    return TrainableRole(chunks, topology, config.optim, model.dtype, config.placement)


def _rollouts(
    spec: RunSpec,
    model: PretrainedModel,
    actor: TrainableRole,
    train: PromptSet,
    held_out: PromptSet | None,
    topology: Topology,
) -> Rollouts:
    config, filtering = spec.config, spec.config.algorithm.filter_groups
    stream = PromptStream(train, config.trainer.seed if config.data.shuffle else None)
    ranks = torch.distributed.get_world_size()
    admits = partial(_differs, filtering.metric) if filtering.enable else None
    collector = Collector(
        ENGINES.get(config.rollout.engine).fn(config, model),
        single_turn,
        RewardWorkers(spec.rewards, config.reward, answer_text(config, model)),
        _asking(spec),
        vocab_size=model.config.vocab_size,
        rank=topology.rank,
        ranks=ranks,
    )
    return Rollouts(
        collector=collector,
        stream=stream,
        buffer=Buffer(gather_from_all, stream, topology.rank, ranks, admits),
        held_out={} if held_out is None else {number: held_out[number] for number in range(len(held_out))},
        weights=LiveWeights.of_chunks(actor.chunks, model.architecture, model.config, topology),
    )


def answer_text(config: Config, model: PretrainedModel) -> AnswerText:
    """How the answers of a run are read."""
    ends = set(config.rollout.stop_token_ids) | (set() if config.rollout.ignore_eos else set(model.end_tokens))
    return AnswerText(model.tokenizer, ends, config.reward.skip_special_tokens)


def _differs(metric: str, group: Group) -> bool:
    """Whether the answers of a group are not all worth the same."""
    judgements = [answer.judgement for answer in group.samples]
    return has_signal([j.total_reward if metric == "reward" else j.accuracy for j in judgements])


def _asking(spec: RunSpec) -> Asking:
    config = spec.config
    return Asking(
        samples=config.rollout.n,
        sampling=sampling_of(config, config.rollout),
        greedy=sampling_of(config, ValidationSamplingConfig()),
        validation=sampling_of(config, config.rollout.val_kwargs),
        validation_samples=config.rollout.val_kwargs.n,
        run_seed=config.trainer.seed,
        timeout_s=config.rollout.timeout_s,
        with_baseline=spec.estimator.traits.greedy_baseline,
        prompts_per_draw=config.data.train_batch_size,
    )


def sampling_of(config: Config, drawn: RolloutConfig | ValidationSamplingConfig) -> SamplingParams:
    """How tokens are drawn, by the settings of training or of validation."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )


def records(config: Config, models: Mapping[str, PretrainedModel | None], topology: Topology) -> Records:
    """What this rank writes down; the first rank reports, and holds the run's folder.

    Raises ConfigError, on every rank, when another run has the folder.
    """
    out_dir, steps = config.trainer.out_dir, config.trainer.total_training_steps
    given = {role: model for role, model in models.items() if model is not None}
    description = RunDescription.of(config, given, torch.distributed.get_world_size())
    with fail_together():
        lock = RunLock(out_dir) if topology.rank == 0 else None
        if topology.rank == 0:
            run_folder.describe(Path(out_dir), description.config)
    greedy = "" if config.rollout.val_kwargs.temperature else "greedy "
    reporter = Reporter(out_dir, steps, f"held-out {greedy}accuracy") if topology.rank == 0 else SilentReporter()
    return Records(reporter, description, lock)
