"""What a configuration really does, as a table: printed at the start of a run, and by `mppo plan` without one."""

from dataclasses import dataclass
from math import exp
from typing import Any

from rich.console import Console
from rich.table import Table

from mppo.algorithm.rollout_correction.config import Bounds
from mppo.algorithm.rollout_correction.plugins import REJECTIONS, RejectionTraits
from mppo.batch.batch_plan import MicroBatchLimit
from mppo.config import FilterGroupsConfig, ParallelConfig, RewardConfig
from mppo.megatron.topology import Sizes
from mppo.trainer.run_spec import Anchor, RunSpec, UpdateSettings


@dataclass(frozen=True)
class UpdatePlan:
    """The numbers of one role. `None`: known only once the lengths are (micro-batches by tokens)."""

    loss: str
    loss_agg_mode: str
    trajectories_per_mini_batch: int
    trajectories_per_mini_batch_per_rank: float
    micro_batch: str
    trajectories_per_wave: int | None
    """Trajectories in one micro-batch of all data-parallel ranks together."""
    micro_batches_per_mini_batch: int | None
    """Gradient accumulation: micro-batches of one rank per optimizer step; more where long sequences bunch."""
    mini_batches_per_epoch: int
    epochs: int
    optimizer_steps_per_training_step: int


@dataclass(frozen=True)
class Plan:
    world_size: int
    data_parallel_size: int
    layout: str
    critic_model: str
    """Where the critic starts from, in which dtype, and its layout where that is not the actor's."""
    prompts_per_step: int
    answers_per_prompt: int
    trajectories_per_step: int
    adv_estimator: str
    reference: str
    kl_in_loss: str
    kl_in_reward: str
    anchor: str
    """The policy that the ratio is against."""
    importance_weights: str
    rejection: str
    counted: str
    """What the aggregation divides by."""
    reward_shaping: str
    dynamic_sampling: str
    critic_warmup_steps: int
    total_optimizer_steps: int
    actor: UpdatePlan
    critic: UpdatePlan | None
    warnings: list[str]


def make_plan(spec: RunSpec, world_size: int) -> Plan:
    """A pure function of the resolved configuration."""
    config = spec.config
    actor = _update_plan(spec.policy_loss.name, spec, spec.actor, config.parallel)
    critic = None
    if spec.critic is not None and spec.critic_parallel is not None:
        critic = _update_plan("clipped value loss", spec, spec.critic, spec.critic_parallel)
    control = config.algorithm.kl_ctrl
    return Plan(
        world_size=world_size,
        data_parallel_size=spec.data_parallel_size,
        layout=_layout_line(config.parallel, spec.data_parallel_size),
        critic_model=_critic_line(spec),
        prompts_per_step=config.data.train_batch_size,
        answers_per_prompt=config.rollout.n,
        trajectories_per_step=spec.trajectories,
        adv_estimator=config.algorithm.adv_estimator,
        reference=f"frozen copy, kept on the {config.ref.placement}" if config.need_reference else "none",
        kl_in_loss=f"{config.actor.kl_loss_coef} x {config.actor.kl_loss_type}" if config.actor.use_kl_loss else "off",
        kl_in_reward=(
            f"{control.kl_coef} ({control.type}) x {config.algorithm.kl_penalty}"
            if config.algorithm.use_kl_in_reward
            else "off"
        ),
        **_correction_lines(spec),
        reward_shaping=_shaping_line(config.reward),
        dynamic_sampling=_sampling_line(config.algorithm.filter_groups),
        critic_warmup_steps=config.trainer.critic_warmup,
        total_optimizer_steps=actor.optimizer_steps_per_training_step
        * max(config.trainer.total_training_steps - config.trainer.critic_warmup, 0),
        actor=actor,
        critic=critic,
        warnings=spec.warnings,
    )


def _layout_line(parallel: ParallelConfig, dp: int) -> str:
    layout = f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size}"
    if parallel.virtual_pipeline_model_parallel_size:
        layout += f" (VPP {parallel.virtual_pipeline_model_parallel_size})"
    if parallel.context_parallel_size > 1:
        layout += f" x CP {parallel.context_parallel_size}"
    layout += f" x DP {dp}" + (" + SP" if parallel.sequence_parallel else "")
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    layout += f", {first} layers in the first stage" if first else ""
    layout += f", {last} layers in the last stage" if last else ""
    if parallel.expert_model_parallel_size > 1:
        layout += f", experts over EP {parallel.expert_model_parallel_size}"
    return layout


def _critic_line(spec: RunSpec) -> str:
    if spec.critic_parallel is None:
        return "none"
    config, critic = spec.config, spec.config.critic
    line = f"{critic.path or 'the actor with a zero head'}, {critic.dtype or config.model.dtype}"
    if spec.critic_parallel != config.parallel:
        line += f", {_layout_line(spec.critic_parallel, spec.data_parallel_size)}"
    return line


def _correction_lines(spec: RunSpec) -> dict[str, str]:
    """Who is corrected against whom, and what of it trains."""
    correction, masks = spec.correction, spec.config.algorithm.overlong_masking
    bypass = correction.bypass_mode
    against = "current policy over rollout's, each mini-batch" if bypass else "old policy over rollout's"
    weights, bounds = "off", correction.is_bounds
    if correction.rollout_is is not None:
        cut = f"at most {bounds.upper:g}" if bounds.lower is None else f"0 outside {bounds.lower:g} to {bounds.upper:g}"
        normalised = ", divided by their mean" if correction.rollout_is_batch_normalize else ""
        weights = f"{correction.rollout_is} ({against}), {cut}{normalised}; on {' + '.join(correction.apply_to)}"
    rejection = [
        f"{name}: {_kept(REJECTIONS.get(name).traits, bounds)}" for name, bounds in correction.rs_bounds.items()
    ]
    rejection += ["answers cut at data.max_response_length"] * masks
    return {
        "anchor": _anchor_line(spec),
        "importance_weights": weights,
        "rejection": ", ".join(rejection) or "off",
        "counted": "actions that train" if correction.denominator == "kept" else "all actions",
    }


def _anchor_line(spec: RunSpec) -> str:
    match spec.anchor(spec.config.data.train_batch_size):
        case Anchor.ROLLOUT_POLICY:
            return f"the rollout's policy ({spec.correction.loss_type})"
        case Anchor.CURRENT_POLICY:
            return "the current policy, without a pass (one optimizer step; actor.old_log_prob_pass=always makes one)"
        case Anchor.OWN_PASS:
            return "old_log_probs, one pass a step"


def _kept(option: RejectionTraits, bounds: Bounds) -> str:
    if option.log_ratio and bounds.lower is not None:
        return f"ratio within {exp(-bounds.upper):.4g} to {exp(-bounds.lower):.4g}"
    return f"at most {bounds.upper:g}"


def _shaping_line(reward: RewardConfig) -> str:
    steps = [f"penalty over the last {reward.overlong_buffer.len} tokens"] if reward.overlong_buffer.len else []
    steps += ["running normalisation"] * reward.running_normalization
    steps += [f"clip at {reward.clip:g}"] if reward.clip is not None else []
    return ", then ".join(steps) or "none"


def _sampling_line(filtering: FilterGroupsConfig) -> str:
    if not filtering.enable:
        return "off"
    return f"groups of equal {filtering.metric} are drawn anew, at most {filtering.max_num_gen_batches} batches a step"


def _update_plan(loss: str, spec: RunSpec, settings: UpdateSettings, parallel: ParallelConfig) -> UpdatePlan:
    ranks = spec.data_parallel_size
    prompts = spec.config.data.train_batch_size
    mini_batches = settings.mini_batches(prompts)
    size = -(-prompts // mini_batches) * spec.config.rollout.n
    by_count = settings.limit.trajectories
    pieces = None
    if by_count:
        multiple = Sizes.of(parallel, ranks).micro_batch_multiple
        pieces = -(-size // (by_count * ranks))
        pieces = -(-pieces // multiple) * multiple
    return UpdatePlan(
        loss=loss,
        loss_agg_mode=settings.loss_agg_mode,
        trajectories_per_mini_batch=size,
        trajectories_per_mini_batch_per_rank=size / ranks,
        micro_batch=_limit(settings.limit),
        trajectories_per_wave=by_count * ranks if by_count else None,
        micro_batches_per_mini_batch=pieces,
        mini_batches_per_epoch=mini_batches,
        epochs=settings.epochs,
        optimizer_steps_per_training_step=settings.optimizer_steps(prompts),
    )


def _limit(limit: MicroBatchLimit) -> str:
    if limit.tokens:
        return f"at most {limit.tokens} tokens per GPU"
    return f"{limit.trajectories} trajectories per data-parallel rank"


def print_plan(plan: Plan, console: Console) -> None:
    """The plan as a table of two or three columns."""
    table = Table(title="what this configuration does", show_header=False)
    for name, value in vars(plan).items():
        if name not in ("actor", "critic", "warnings"):
            table.add_row(_title(name), _shown(value))
    for role, update in (("actor", plan.actor), ("critic", plan.critic)):
        table.add_section()
        if update is None:
            table.add_row(role, "none: the estimator needs no values")
            continue
        for name, value in vars(update).items():
            table.add_row(f"{role}: {_title(name)}", _shown(value))
    console.print(table)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _title(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> str:
    if value is None:
        return "depends on the lengths"
    return f"{value:g}" if isinstance(value, float) else str(value)
