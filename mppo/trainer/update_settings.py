"""How a role goes through a batch: what its configuration says, and what a null in it stands for."""

from dataclasses import dataclass

from mppo.batch.batch_plan import MicroBatchLimit
from mppo.config import Config, TrainedRoleConfig
from mppo.errors import ConfigError


@dataclass(frozen=True)
class UpdateSettings:
    """How one role goes through a batch."""

    prompts: int
    """Per optimizer step at most, each with all its trajectories."""
    epochs: int
    shuffle: bool
    limit: MicroBatchLimit
    infer_limit: MicroBatchLimit
    """Of forward-only passes."""
    loss_agg_mode: str
    norm: float
    """C of seq-mean-token-sum-norm, tokens."""
    denominator: str = "loss_mask"
    """What is counted: `loss_mask`, all actions, or `kept`, those that train."""

    @property
    def limits(self) -> list[MicroBatchLimit]:
        """Of all its passes."""
        return [self.infer_limit, self.limit]

    def mini_batches(self, prompts: int) -> int:
        """Of an epoch over the trajectories of so many prompts."""
        return -(-prompts // self.prompts)

    def optimizer_steps(self, prompts: int) -> int:
        """Of a training step over the trajectories of so many prompts."""
        return self.epochs * self.mini_batches(prompts)


@dataclass(frozen=True)
class Defaults:
    """What a null field of a role stands for."""

    loss_agg_mode: str
    norm: float
    prompts: int
    """Per optimizer step."""
    limits: tuple[MicroBatchLimit, MicroBatchLimit] | None = None
    """Of training and of forward-only passes, for a role that says nothing of its micro-batches; None: it must."""


def actor_settings(config: Config, paper_mode: str, denominator: str) -> UpdateSettings:
    """`paper_mode` is the aggregation mode of the paper of its loss. Raises ConfigError for a missing limit."""
    defaults = Defaults(paper_mode, config.data.max_response_length, prompts=0)  # the actor's own are never null
    return _settings(config.actor, defaults, denominator)


def critic_settings(config: Config, actor: UpdateSettings) -> UpdateSettings:
    """A critic inherits what it does not say from the actor. Raises ConfigError for a missing limit."""
    defaults = Defaults(actor.loss_agg_mode, actor.norm, actor.prompts, (actor.limit, actor.infer_limit))
    return _settings(config.critic, defaults, actor.denominator)


def _settings(given: TrainedRoleConfig, defaults: Defaults, denominator: str) -> UpdateSettings:
    limits = defaults.limits
    if limits is None or given.has_limits:
        limits = _limits(given)
    return UpdateSettings(
        prompts=given.ppo_mini_batch_size or defaults.prompts,
        epochs=given.ppo_epochs,
        shuffle=given.shuffle,
        limit=limits[0],
        infer_limit=limits[1],
        loss_agg_mode=given.loss_agg_mode or defaults.loss_agg_mode,
        norm=given.loss_scale_factor or defaults.norm,
        denominator=denominator,
    )


def _limits(given: TrainedRoleConfig) -> tuple[MicroBatchLimit, MicroBatchLimit]:
    """Of training, and of the forward-only pass, whose own may be null: as in training."""
    field, most = given.training_limit()
    if most is None:
        by_tokens = str(given.use_dynamic_bsz).lower()
        raise ConfigError(f"{given.role}.{field} is not given; {given.role}.use_dynamic_bsz={by_tokens} needs it")
    own_field, own = given.forward_only_limit()
    kind = "tokens" if given.use_dynamic_bsz else "trajectories"
    limit = MicroBatchLimit(**{kind: most}, field=f"{given.role}.{field}")
    return limit, limit if own is None else MicroBatchLimit(**{kind: own}, field=f"{given.role}.{own_field}")
