"""What contradicts itself is an error; what is odd but possible, a warning. Pure functions of the configuration."""

from mppo.algorithm.advantages import Estimator
from mppo.algorithm.kl import FULL
from mppo.algorithm.rollout_correction import RolloutCorrectionConfig
from mppo.batch.batch_plan import split_mini_batches
from mppo.config import Config
from mppo.errors import ConfigError
from mppo.megatron.topology import Sizes
from mppo.trainer.update_settings import UpdateSettings

CORRECTION = "algorithm.rollout_correction"


def refuse_contradictions(
    config: Config, estimator: Estimator, correction: RolloutCorrectionConfig, actor: UpdateSettings
) -> None:
    """Raise ConfigError for settings that exclude each other, naming both."""
    _refuse_idle_correction(config, correction, actor)
    _refuse_gradient_in_reward(config)
    if correction.bypass_mode:
        _refuse_what_needs_the_old_pass(config, estimator)
    if estimator.traits.greedy_baseline and config.reward.shapes:
        raise ConfigError(
            f"reward: {estimator.name} compares with the greedy answer's own reward, which is not shaped;"
            " unset overlong_buffer, running_normalization and clip"
        )
    if estimator.reward_keys and config.reward.on_error == "score":
        raise ConfigError(
            f"reward.on_error=score gives an answer one number, and {estimator.name} reads parts of the reward; use"
            " abstain"
        )


def _refuse_idle_correction(config: Config, correction: RolloutCorrectionConfig, actor: UpdateSettings) -> None:
    """Fields of the rollout correction that other groups leave without effect."""
    if correction.denominator == "kept":
        if correction.rollout_rs is None and not config.algorithm.overlong_masking:
            raise ConfigError(
                f"{CORRECTION}.denominator=kept is set but would have no effect: neither rollout_rs nor"
                " algorithm.overlong_masking takes anything out; unset it or change that"
            )
        if actor.loss_agg_mode == "token-sum":
            raise ConfigError(f"{CORRECTION}.denominator has no effect: token-sum divides by nothing")
    absent = {
        "kl": None if config.actor.use_kl_loss else "actor.use_kl_loss is off",
        "entropy": None if config.actor.entropy_coeff else "actor.entropy_coeff is 0",
    }
    for term, reason in absent.items():
        if reason and term in correction.apply_to:
            raise ConfigError(f"{CORRECTION}.apply_to names {term}, which is not in the loss: {reason}")


def _refuse_gradient_in_reward(config: Config) -> None:
    form = config.algorithm.kl_penalty
    if config.algorithm.use_kl_in_reward and form.endswith("+"):
        raise ConfigError(
            f"algorithm.kl_penalty={form}: a + changes the gradient, and the reward has none; use"
            f" {form.removesuffix('+')}"
        )


def _refuse_what_needs_the_old_pass(config: Config, estimator: Estimator) -> None:
    algorithm, skipped = config.algorithm, f"needs the old-log-prob pass, which {CORRECTION}.bypass_mode skips"
    if estimator.traits.sum_pi_squared:
        raise ConfigError(f"algorithm.adv_estimator={algorithm.adv_estimator} {skipped}")
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL:
        raise ConfigError(f"algorithm.kl_penalty=full {skipped}; use a sampled form")


def find_warnings(config: Config, estimator: Estimator | None, roles: list[UpdateSettings], sizes: Sizes) -> list[str]:
    """What a user might not have meant.

    `roles` are the actor's settings and, where there is one, the critic's; without an `estimator` answers are given.
    """
    return [
        warning
        for warning in (
            _both_kl_paths(config),
            *_short_budgets(config, roles, sizes),
            *_uneven_mini_batches(config, roles),
            _groups_of_one(config, estimator),
            _penalty_for_all(config),
            _warmup_throughout(config),
        )
        if warning
    ]


def _both_kl_paths(config: Config) -> str | None:
    if not (config.actor.use_kl_loss and config.algorithm.use_kl_in_reward):
        return None
    return (
        f"both KL paths are on: actor.kl_loss_coef={config.actor.kl_loss_coef} in the loss and"
        f" algorithm.kl_ctrl.kl_coef={config.algorithm.kl_ctrl.kl_coef} in the reward add up"
    )


def _short_budgets(config: Config, roles: list[UpdateSettings], sizes: Sizes) -> list[str]:
    """Limits of tokens that the longest trajectory would break; each once, for a critic may have the actor's."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    limits = {limit.field: sizes.replica_limit(limit) for settings in roles for limit in settings.limits}
    return [
        f"{field}={limit.per_gpu.tokens} makes a micro-batch of {limit.tokens} tokens, less than"
        f" data.max_prompt_length + data.max_response_length = {longest}: a longer trajectory will stop the run"
        for field, limit in limits.items()
        if limit.tokens is not None and limit.tokens < sizes.padded_length(longest)
    ]


def _uneven_mini_batches(config: Config, roles: list[UpdateSettings]) -> list[str]:
    """Mini-batches of other sizes than the configuration names; each once, for a critic may have the actor's."""
    batch = config.data.train_batch_size
    found: dict[int, str] = {}
    for number, settings in enumerate(roles):
        role, prompts = ("critic" if number else "actor"), settings.prompts
        if prompts > batch:
            taken = "one optimizer step takes the whole batch"
        elif batch % prompts:
            sizes = sorted({len(part) for part in split_mini_batches(batch, prompts)}, reverse=True)
            taken = f"optimizer steps take {' or '.join(map(str, sizes))} prompts"
        else:
            continue
        sizes_differ = f"{role}.ppo_mini_batch_size={prompts} does not divide data.train_batch_size={batch}"
        found.setdefault(prompts, f"{sizes_differ}: {taken}")
    return list(found.values())


def _groups_of_one(config: Config, estimator: Estimator | None) -> str | None:
    if estimator is None or not estimator.traits.groups or config.rollout.n > 1:
        return None
    return f"{estimator.name} with rollout.n=1 has groups of one, whose advantage is their raw score"


def _penalty_for_all(config: Config) -> str | None:
    penalised, longest = config.reward.overlong_buffer.len, config.data.max_response_length
    if penalised <= longest:
        return None
    return (
        f"reward.overlong_buffer.len={penalised} is more than data.max_response_length={longest}: every answer is"
        " punished"
    )


def _warmup_throughout(config: Config) -> str | None:
    warmup, total = config.trainer.critic_warmup, config.trainer.total_training_steps
    return (
        f"trainer.critic_warmup={warmup} lasts for all {total} steps: the actor never trains"
        if warmup >= total
        else None
    )
