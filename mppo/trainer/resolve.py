"""What a configuration resolves to: plugins found, defaults decided, contradictions refused. Launches nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mppo.algorithm.advantages import ESTIMATORS
from mppo.algorithm.aggregation import AGGREGATIONS
from mppo.algorithm.kl import KL_FORMS
from mppo.algorithm.policy_losses import POLICY_LOSSES
from mppo.batch.plan import MicroBatchLimit
from mppo.config import Config
from mppo.errors import ConfigError
from mppo.rollout.generators import GENERATORS
from mppo.rollout.rewards import REWARDS


@dataclass(frozen=True)
class UpdateSettings:
    """How one role goes through a batch."""

    mini_batch_size: int
    """Trajectories per optimizer step."""
    epochs: int
    shuffle: bool
    limit: MicroBatchLimit
    infer_limit: MicroBatchLimit
    loss_agg_mode: str
    norm: float
    """C of seq-mean-token-sum-norm, tokens."""

    def optimizer_steps(self, trajectories: int) -> int:
        """Optimizer steps of one training step."""
        return self.epochs * -(-trajectories // self.mini_batch_size)


@dataclass(frozen=True)
class Resolved:
    config: Config
    data_parallel_size: int
    trajectories: int
    """Per training step."""
    estimator: Callable
    policy_loss: Callable
    reward: Callable
    actor: UpdateSettings
    critic: UpdateSettings | None
    warnings: list[str]

    @property
    def limits(self) -> list[MicroBatchLimit]:
        """Of all passes of a training step."""
        roles = [self.actor] + ([self.critic] if self.critic else [])
        return [limit for role in roles for limit in (role.infer_limit, role.limit)]


def resolve(config: Config, data_parallel_size: int) -> Resolved:
    """Decide everything that follows from the configuration alone.

    Raises ConfigError for an unknown name, a knob the chosen plugin does not read, a field that would have no
    effect, and, with `strict`, for what is otherwise a warning.
    """
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    loss_knobs = dict(config.actor.policy_loss)
    loss = POLICY_LOSSES.get(loss_knobs.pop("loss_mode"))
    reward = REWARDS.get(config.reward.function)
    actor = _actor_settings(config, (loss.traits or {}).get("loss_agg_mode", "token-mean"))
    critic = _critic_settings(config, actor) if (estimator.traits or {}).get("critic") else None
    _check_names(config)
    _refuse_idle_fields(config, with_critic=critic is not None)
    _refuse_idle_scale_factor("actor", config.actor.loss_scale_factor, actor)
    if critic is not None:
        _refuse_idle_scale_factor("critic", config.critic.loss_scale_factor, critic)
    warnings = _warnings(config, actor)
    if config.strict and warnings:
        raise ConfigError("strict=true: " + "; ".join(warnings))
    return Resolved(
        config=config,
        data_parallel_size=data_parallel_size,
        trajectories=config.data.train_batch_size * config.rollout.n,
        estimator=estimator.bind(config.algorithm.adv_options, "algorithm.adv_options"),
        policy_loss=loss.bind(loss_knobs, "actor.policy_loss"),
        reward=reward.bind(config.reward.options, "reward.options"),
        actor=actor,
        critic=critic,
        warnings=warnings,
    )


def _limit(where: str, by_tokens: bool, trajectories: int | None, tokens: int | None) -> MicroBatchLimit:
    if (tokens if by_tokens else trajectories) is None:
        missing = "ppo_max_token_len_per_gpu" if by_tokens else "ppo_micro_batch_size_per_gpu"
        raise ConfigError(f"{where}.{missing} is not given; {where}.use_dynamic_bsz={str(by_tokens).lower()} needs it")
    return MicroBatchLimit(tokens=tokens) if by_tokens else MicroBatchLimit(trajectories=trajectories)


def _limits(
    where: str, role: Any, infer_trajectories: int | None, infer_tokens: int | None
) -> tuple[MicroBatchLimit, MicroBatchLimit]:
    """Of training, and of the forward-only pass, whose own numbers may be null: as in training."""
    trajectories, tokens = role.ppo_micro_batch_size_per_gpu, role.ppo_max_token_len_per_gpu
    return (
        _limit(where, role.use_dynamic_bsz, trajectories, tokens),
        _limit(where, role.use_dynamic_bsz, infer_trajectories or trajectories, infer_tokens or tokens),
    )


def _first_given(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _actor_settings(config: Config, paper_mode: str) -> UpdateSettings:
    actor = config.actor
    limit, infer_limit = _limits(
        "actor", actor, actor.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len_per_gpu
    )
    return UpdateSettings(
        mini_batch_size=actor.ppo_mini_batch_size * config.rollout.n,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        limit=limit,
        infer_limit=infer_limit,
        loss_agg_mode=actor.loss_agg_mode or paper_mode,
        norm=_first_given(actor.loss_scale_factor, config.data.max_response_length),
    )


def _critic_settings(config: Config, actor: UpdateSettings) -> UpdateSettings:
    critic = config.critic
    own = [n for n in vars(critic) if n.endswith("_per_gpu") and getattr(critic, n)]
    limit, infer_limit = actor.limit, actor.infer_limit
    if own or critic.use_dynamic_bsz:
        limit, infer_limit = _limits(
            "critic", critic, critic.ppo_infer_micro_batch_size_per_gpu, critic.ppo_infer_max_token_len_per_gpu
        )
    prompts = critic.ppo_mini_batch_size or config.actor.ppo_mini_batch_size
    return UpdateSettings(
        mini_batch_size=prompts * config.rollout.n,
        epochs=critic.ppo_epochs,
        shuffle=critic.shuffle,
        limit=limit,
        infer_limit=infer_limit,
        loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
        norm=_first_given(critic.loss_scale_factor, actor.norm),
    )


def _check_names(config: Config) -> None:
    """Look up what is otherwise looked up only when it is used."""
    for mode in (config.actor.loss_agg_mode, config.critic.loss_agg_mode):
        if mode is not None:
            AGGREGATIONS.get(mode)
    KL_FORMS.get(config.actor.kl_loss_type.removesuffix("+"))
    KL_FORMS.get(config.algorithm.kl_penalty.removesuffix("+"))
    for where, source in (("data.train", config.data.train), ("data.val", config.data.val)):
        if source.generator:
            GENERATORS.get(source.generator).configure(source.options, f"{where}.options")


def _refuse_idle_fields(config: Config, with_critic: bool) -> None:
    """A field that differs from its default but would not be read is an error that says when it would be."""
    default = Config()
    idle: list[tuple[bool, str, str]] = [
        (not with_critic, "critic", f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs no critic"),
        (not config.need_reference, "ref", "neither actor.use_kl_loss nor algorithm.use_kl_in_reward is on"),
        (not config.actor.use_kl_loss, "actor.kl_loss_coef", "actor.use_kl_loss is off"),
        (not config.actor.use_kl_loss, "actor.kl_loss_type", "actor.use_kl_loss is off"),
        (not config.algorithm.use_kl_in_reward, "algorithm.kl_penalty", "algorithm.use_kl_in_reward is off"),
        (not config.algorithm.use_kl_in_reward, "algorithm.kl_ctrl", "algorithm.use_kl_in_reward is off"),
        (config.algorithm.kl_ctrl.type == "fixed", "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type is fixed"),
        (config.algorithm.kl_ctrl.type == "fixed", "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.type is fixed"),
        (not config.data.val.given, "trainer.test_freq", "data.val is not given"),
        (not config.data.val.given, "trainer.val_before_train", "data.val is not given"),
    ]
    for unread, path, reason in idle:
        if unread and _at(config, path) != _at(default, path):
            raise ConfigError(f"{path} is set but would have no effect: {reason}; unset it or change that")


def _refuse_idle_scale_factor(role: str, given: float | None, settings: UpdateSettings) -> None:
    if given is not None and settings.loss_agg_mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"{role}.loss_scale_factor is set but {role}.loss_agg_mode is {settings.loss_agg_mode}, which does not"
            " read it; unset it"
        )


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _warnings(config: Config, actor: UpdateSettings) -> list[str]:
    found = []
    if config.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        found.append(
            f"both KL paths are on: actor.kl_loss_coef={config.actor.kl_loss_coef} in the loss and"
            f" algorithm.kl_ctrl.kl_coef={config.algorithm.kl_ctrl.kl_coef} in the reward add up"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if actor.limit.tokens is not None and actor.limit.tokens < longest:
        found.append(
            f"actor.ppo_max_token_len_per_gpu={actor.limit.tokens} is less than data.max_prompt_length +"
            f" data.max_response_length = {longest}: a longer trajectory will stop the run"
        )
    if actor.mini_batch_size > config.data.train_batch_size * config.rollout.n:
        found.append(
            f"actor.ppo_mini_batch_size={config.actor.ppo_mini_batch_size} is more than data.train_batch_size="
            f"{config.data.train_batch_size}: one optimizer step takes the whole batch"
        )
    if config.algorithm.adv_estimator == "grpo" and config.rollout.n == 1:
        found.append("grpo with rollout.n=1 has groups of one, which keep their raw score as advantage")
    return found
