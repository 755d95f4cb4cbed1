"""What a configuration resolves to: plugins found, defaults decided, contradictions refused. Launches nothing."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.advantages import Estimator
from mppo.algorithm.advantages import estimator as make_estimator
from mppo.algorithm.advantages.estimator_probe import probe_estimator
from mppo.algorithm.aggregation import AGGREGATIONS
from mppo.algorithm.kl import check_kl_form
from mppo.algorithm.policy_losses import PolicyLoss, policy_loss
from mppo.algorithm.policy_losses.probe import probe
from mppo.algorithm.reward_shaping import OutcomeShaping
from mppo.algorithm.rollout_correction import RolloutCorrectionConfig, rollout_correction_config
from mppo.config import Config, ParallelConfig, RunFacts, UpdateFacts, refuse_unread
from mppo.config.parallel import PIPELINE_FIELDS
from mppo.errors import ConfigError
from mppo.megatron.topology import Sizes
from mppo.registry import check_signature
from mppo.rollout.engines import ENGINES
from mppo.rollout.rewards import Rewards
from mppo.rollout.tasks import GENERATORS, rewards_of
from mppo.trainer.contradictions import find_warnings, refuse_contradictions
from mppo.trainer.update_settings import UpdateSettings, actor_settings, critic_settings

SCALED_BY_FACTOR = "seq-mean-token-sum-norm"
"""The aggregation mode that divides by `loss_scale_factor`."""


class Anchor(Enum):
    """The policy that the PPO ratio is against, and where its log-probs (`old_log_probs`) come from."""

    ROLLOUT_POLICY = "rollout_policy"
    """Bypass mode: `rollout_log_probs` are taken for them."""
    CURRENT_POLICY = "current_policy"
    """The policy that is updated, whose log-probs the training pass makes anyway; the ratio is 1."""
    OWN_PASS = "own_pass"
    """A forward-only pass before the updates."""


@dataclass(frozen=True)
class RunSpec:
    config: Config
    data_parallel_size: int
    trajectories: int
    """Per training step, as many as are asked for."""
    estimator: Estimator
    policy_loss: PolicyLoss
    correction: RolloutCorrectionConfig
    rewards: Rewards
    actor: UpdateSettings
    critic: UpdateSettings | None
    critic_parallel: ParallelConfig | None
    """The critic's layout."""
    warnings: list[str]

    @property
    def terms(self) -> ActorTerms:
        """What the actor minimises."""
        actor = self.config.actor
        return ActorTerms(
            policy_loss=self.policy_loss,
            entropy_coeff=actor.entropy_coeff,
            report_entropy=actor.calculate_entropy,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_loss_type=actor.kl_loss_type,
            importance_weighted=tuple(self.correction.apply_to),
        )

    @property
    def outcome_shaping(self) -> OutcomeShaping:
        """What becomes of outcomes before the estimator sees them."""
        reward = self.config.reward
        return OutcomeShaping(
            max_response_length=self.config.data.max_response_length,
            overlong_buffer=reward.overlong_buffer.len,
            penalty_factor=reward.overlong_buffer.penalty_factor,
            normalise=reward.running_normalization,
            clip=reward.clip,
        )

    def anchor(self, prompts: int) -> Anchor:
        """Where the anchor of a training step over the trajectories of so many prompts comes from.

        Only where one optimizer step takes them all does nothing move the policy away from the anchor.
        """
        if self.correction.bypass_mode:
            return Anchor.ROLLOUT_POLICY
        one_step = self.actor.optimizer_steps(prompts) == 1
        if one_step and self.config.actor.old_log_prob_pass == "auto" and not self.reads_anchor_before_update:
            return Anchor.CURRENT_POLICY
        return Anchor.OWN_PASS

    @property
    def reads_anchor_before_update(self) -> bool:
        """Whether the correction, the rewards, the estimator or the loss's own preparation read `old_log_probs`."""
        return (
            self.correction.rollout_is is not None
            or self.correction.rollout_rs is not None
            or self.config.algorithm.use_kl_in_reward
            or self.estimator.traits.reads_old_policy
            or self.policy_loss.needs_mini_batch
        )

    @property
    def has_forward_only_pass(self) -> bool:
        """Whether a pass is planned by the actor's limits of forward-only passes: its own, the reference's, or that of
        a critic without limits of its own."""
        correction = self.correction
        prepares = correction.rollout_is or correction.rollout_rs or self.policy_loss.needs_mini_batch
        return (
            self.config.need_reference
            or self.anchor(self.config.data.train_batch_size) is Anchor.OWN_PASS
            or (correction.bypass_mode and bool(prepares))
            or (self.critic is not None and not self.config.critic.has_limits)
        )

    @property
    def facts(self) -> RunFacts:
        """What decides which fields are read."""
        config, rollout = self.config, self.config.rollout
        return RunFacts(
            adv_estimator=config.algorithm.adv_estimator,
            reads_rewards=self.estimator.traits.reads_rewards,
            answers_per_prompt=rollout.n,
            answers_may_end=not rollout.ignore_eos or bool(rollout.stop or rollout.stop_token_ids),
            has_validation=config.data.val.given,
            has_sources=bool(config.reward.sources),
            bypass_mode=self.correction.bypass_mode,
            has_forward_only_pass=self.has_forward_only_pass,
            actor_parallel={
                "sequence_parallel": config.parallel.sequence_parallel,
                **{name: getattr(config.parallel, name) for name in PIPELINE_FIELDS},
                "virtual_pipeline_model_parallel_size": config.parallel.virtual_pipeline_model_parallel_size or 1,
            },
            updates=self._update_facts(),
        )

    def _update_facts(self) -> dict[str, UpdateFacts]:
        def facts(settings: UpdateSettings, is_read: bool, dtype: str) -> UpdateFacts:
            mini_batches = settings.mini_batches(self.config.data.train_batch_size)
            return UpdateFacts(mini_batches, settings.loss_agg_mode, is_read, dtype)

        config, dtype = self.config, self.config.model.dtype
        actor_reads = self.actor.loss_agg_mode == SCALED_BY_FACTOR
        if self.critic is None:
            return {"actor": facts(self.actor, actor_reads, dtype)}
        critic_reads = self.critic.loss_agg_mode == SCALED_BY_FACTOR
        inherited = critic_reads and config.critic.loss_scale_factor is None
        return {
            "actor": facts(self.actor, actor_reads or inherited, dtype),
            "critic": facts(self.critic, critic_reads, config.critic.dtype or dtype),
        }


def make_run_spec(config: Config, data_parallel_size: int, supervised: bool = False) -> RunSpec:
    """Decide everything that follows from the configuration alone, for training by advantages or on given answers.

    Raises ConfigError for an unknown name, a knob the chosen plugin does not read, a field that would have no
    effect, and, with `strict`, for what is otherwise a warning.
    """
    algorithm = config.algorithm
    correction = rollout_correction_config(algorithm.rollout_correction)
    loss = _policy_loss(config.actor.policy_loss, correction)
    probe(loss)
    estimator = make_estimator(algorithm.adv_estimator, algorithm.adv_options, "algorithm.adv_options")
    probe_estimator(estimator)
    actor = actor_settings(config, loss.loss_agg_mode, correction.denominator)
    critic = critic_settings(config, actor) if estimator.traits.critic else None
    _check_names(config, actor)
    refuse_contradictions(config, estimator, correction, actor)
    roles = [settings for settings in (actor, critic) if settings is not None]
    sizes = Sizes.of(config.parallel, data_parallel_size)
    spec = RunSpec(
        config=config,
        data_parallel_size=data_parallel_size,
        trajectories=config.data.train_batch_size * config.rollout.n,
        estimator=estimator,
        policy_loss=loss,
        correction=correction,
        rewards=rewards_of(config.reward),
        actor=actor,
        critic=critic,
        critic_parallel=config.critic.parallel.within(config.parallel) if critic else None,
        warnings=find_warnings(config, None if supervised else estimator, roles, sizes),
    )
    refuse_unread(config, spec.facts)
    if config.strict and spec.warnings:
        raise ConfigError("strict=true: " + "; ".join(spec.warnings))
    return spec


def _policy_loss(given: dict[str, Any], correction: RolloutCorrectionConfig) -> PolicyLoss:
    """The loss by name, or the one that bypass mode chooses: old := rollout takes effect from one place."""
    knobs, where = dict(given), "actor.policy_loss"
    mode = knobs.pop("loss_mode", None)
    if not correction.bypass_mode:
        if mode == "bypass_mode":
            raise ConfigError(
                f"{where}.loss_mode=bypass_mode: set algorithm.rollout_correction.bypass_mode=true instead"
            )
        return policy_loss("vanilla" if mode is None else str(mode), knobs, where)
    if mode not in (None, "bypass_mode"):
        raise ConfigError(
            f"{where}.loss_mode={mode} contradicts algorithm.rollout_correction.bypass_mode=true, which chooses the"
            " loss by its loss_type; unset one of them"
        )
    if "loss_type" in knobs:
        raise ConfigError(f"{where}.loss_type: set algorithm.rollout_correction.loss_type instead")
    if knobs and correction.loss_type == "reinforce":
        raise ConfigError(f"{where}.{next(iter(knobs))}: reinforce, the loss_type of bypass mode, reads no knobs")
    return policy_loss("bypass_mode", {**knobs, "loss_type": correction.loss_type}, where)


def _check_names(config: Config, actor: UpdateSettings) -> None:
    """Look up what is otherwise looked up only when it is used."""
    for mode in (actor.loss_agg_mode, config.critic.loss_agg_mode):
        if mode is not None:
            AGGREGATIONS.get(mode)
    engine = ENGINES.get(config.rollout.engine)
    check_signature(engine.fn, ("config: Config", "model: PretrainedModel"), f"rollout engine {engine.name!r}")
    check_kl_form(config.actor.kl_loss_type, "actor.kl_loss_type")
    check_kl_form(config.algorithm.kl_penalty, "algorithm.kl_penalty")
    for where, source in (("data.train", config.data.train), ("data.val", config.data.val)):
        if source.generator:
            generator = GENERATORS.get(source.generator)
            bound = generator.bind(source.options, f"{where}.options")
            check_signature(bound, (), f"prompt generator {generator.name!r}")
