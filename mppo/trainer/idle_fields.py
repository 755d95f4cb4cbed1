"""What is set but would have no effect is an error; what is odd but possible, a warning."""

from typing import TYPE_CHECKING, Any

from mppo.algorithm.advantages import Estimator
from mppo.algorithm.kl import FULL
from mppo.config import Config
from mppo.errors import ConfigError

if TYPE_CHECKING:
    from mppo.trainer.run_spec import RunSpec, UpdateSettings


Rule = tuple[bool, str, str]
"""Whether a field is unread, its path, and why."""


def refuse_idle_fields(spec: "RunSpec") -> None:
    """Raise ConfigError for a field that differs from its default but would not be read; it says what would read it."""
    config, default = spec.config, Config()
    for unread, path, reason in [*_about_roles(spec), *_about_data(spec)]:
        if unread and _at(config, path) != _at(default, path):
            raise ConfigError(f"{path} is set but would have no effect: {reason}; unset it or change that")
    _refuse_idle_scale_factor("actor", config.actor.loss_scale_factor, spec.actor)
    if spec.critic is not None:
        _refuse_idle_scale_factor("critic", config.critic.loss_scale_factor, spec.critic)
    if spec.correction.denominator == "kept" and not spec.rejects:
        raise ConfigError(
            "algorithm.rollout_correction.denominator=kept is set but would have no effect: neither rollout_rs nor"
            " algorithm.overlong_masking takes anything out; unset it or change that"
        )
    _refuse_idle_rewards(spec)
    _refuse_idle_terms(spec)
    _refuse_with_bypass(spec)


def _about_roles(spec: "RunSpec") -> list[Rule]:
    config, algorithm = spec.config, spec.config.algorithm
    no_critic, name = spec.critic is None, algorithm.adv_estimator
    no_kl_loss, no_kl_reward = not config.actor.use_kl_loss, not algorithm.use_kl_in_reward
    is_fixed = algorithm.kl_ctrl.type == "fixed"
    return [
        (no_critic, "critic", f"algorithm.adv_estimator={name} needs no critic"),
        (no_critic, "trainer.critic_warmup", f"algorithm.adv_estimator={name} needs no critic"),
        (not config.need_reference, "ref", "neither actor.use_kl_loss nor algorithm.use_kl_in_reward is on"),
        (no_kl_loss, "actor.kl_loss_coef", "actor.use_kl_loss is off"),
        (no_kl_loss, "actor.kl_loss_type", "actor.use_kl_loss is off"),
        (no_kl_reward, "algorithm.kl_penalty", "algorithm.use_kl_in_reward is off"),
        (no_kl_reward, "algorithm.kl_ctrl", "algorithm.use_kl_in_reward is off"),
        (is_fixed, "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type is fixed"),
        (is_fixed, "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.type is fixed"),
    ]


def _about_data(spec: "RunSpec") -> list[Rule]:
    config, filtering = spec.config, spec.config.algorithm.filter_groups
    off = "algorithm.filter_groups.enable is off"
    return [
        (not config.data.val.given, "trainer.test_freq", "data.val is not given"),
        (not config.data.val.given, "trainer.val_before_train", "data.val is not given"),
        (not filtering.enable, "algorithm.filter_groups.metric", off),
        (not filtering.enable, "algorithm.filter_groups.max_num_gen_batches", off),
        (filtering.max_num_gen_batches == 1, "algorithm.filter_groups.enable", "max_num_gen_batches=1 draws none anew"),
        (
            config.rollout.ignore_eos and not (config.rollout.stop or config.rollout.stop_token_ids),
            "algorithm.overlong_masking",
            "rollout.ignore_eos=true lets no answer end, so nothing would train",
        ),
        (config.rollout.n == 1, "algorithm.filter_groups.enable", "with rollout.n=1 nothing differs within a group"),
    ]


def _refuse_idle_rewards(spec: "RunSpec") -> None:
    """An estimator that reads only the parts of the reward would not see what changes the reward as a whole."""
    config, name = spec.config, spec.estimator.name
    changes = [("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward), ("reward", config.reward.shapes)]
    for path, is_on in changes:
        if is_on and not spec.estimator.traits.reads_rewards:
            raise ConfigError(
                f"{path} would have no effect: {name} reads the parts of the reward, not the whole; unset it"
            )


def _refuse_idle_terms(spec: "RunSpec") -> None:
    config, terms = spec.config, spec.terms
    absent = {"kl": terms.kl_loss_coef is None, "entropy": not terms.entropy_coeff}
    for term, is_absent in absent.items():
        if is_absent and term in terms.importance_weighted:
            raise ConfigError(
                f"algorithm.rollout_correction.apply_to names {term}, which is not in the loss:"
                f" {'actor.use_kl_loss is off' if term == 'kl' else 'actor.entropy_coeff is 0'}"
            )
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty.endswith("+"):
        raise ConfigError(
            f"algorithm.kl_penalty={config.algorithm.kl_penalty}: a + changes the gradient, and the reward has none;"
            f" use {config.algorithm.kl_penalty.removesuffix('+')}"
        )
    if spec.correction.denominator == "kept" and spec.actor.loss_agg_mode == "token-sum":
        raise ConfigError("algorithm.rollout_correction.denominator has no effect: token-sum divides by nothing")


def _refuse_with_bypass(spec: "RunSpec") -> None:
    """What needs the old policy, of which bypass mode makes no pass; and greedy answers, whose reward is not shaped."""
    algorithm = spec.config.algorithm
    skipped = "needs the old-log-prob pass, which algorithm.rollout_correction.bypass_mode skips"
    if spec.correction.bypass_mode and spec.estimator.traits.sum_pi_squared:
        raise ConfigError(f"algorithm.adv_estimator={algorithm.adv_estimator} {skipped}")
    if spec.correction.bypass_mode and algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL:
        raise ConfigError(f"algorithm.kl_penalty=full {skipped}; use a sampled form")
    if spec.estimator.traits.greedy_baseline and spec.config.reward.shapes:
        raise ConfigError(
            f"reward: {spec.estimator.name} compares with the greedy answer's own reward, which is not shaped;"
            " unset overlong_buffer, running_normalization and clip"
        )


def _refuse_idle_scale_factor(role: str, given: float | None, settings: "UpdateSettings") -> None:
    if given is not None and settings.loss_agg_mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"{role}.loss_scale_factor is set but {role}.loss_agg_mode is {settings.loss_agg_mode}, which does not"
            " read it; unset it"
        )


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def find_warnings(config: Config, estimator: Estimator, actor: "UpdateSettings") -> list[str]:
    """What a user might not have meant."""
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
    if estimator.traits.groups and config.rollout.n == 1:
        found.append(f"{estimator.name} with rollout.n=1 has groups of one, whose advantage is their raw score")
    if config.reward.overlong_buffer.len > config.data.max_response_length:
        found.append(
            f"reward.overlong_buffer.len={config.reward.overlong_buffer.len} is more than data.max_response_length="
            f"{config.data.max_response_length}: every answer is punished"
        )
    if config.trainer.critic_warmup >= config.trainer.total_training_steps:
        found.append(
            f"trainer.critic_warmup={config.trainer.critic_warmup} lasts for all"
            f" {config.trainer.total_training_steps} steps: the actor never trains"
        )
    return found
