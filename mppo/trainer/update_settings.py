"""How a role goes through a batch: what its configuration says, and what a null in it stands for."""

from dataclasses import dataclass

from mppo.batch.batch_plan import MicroBatchLimit
from mppo.config import Config, TrainedRoleConfig


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
    """Of training and of forward-only passes, for a role that says nothing of its micro-batches; None: its own."""


def actor_settings(config: Config, paper_mode: str, denominator: str) -> UpdateSettings:
    """`paper_mode` is the aggregation mode of the paper of its loss."""
    defaults = Defaults(paper_mode, config.data.max_response_length, prompts=0)  # the actor's own are never null
    return _settings(config.actor, defaults, denominator, _longest(config))


def critic_settings(config: Config, actor: UpdateSettings) -> UpdateSettings:
    """A critic inherits what it does not say from the actor."""
    defaults = Defaults(actor.loss_agg_mode, actor.norm, actor.prompts, (actor.limit, actor.infer_limit))
    return _settings(config.critic, defaults, actor.denominator, _longest(config))


def _longest(config: Config) -> int:
    """Tokens of the longest trajectory there can be, padded as any layout of these sizes asks for."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    multiple = 2 * config.parallel.tensor_model_parallel_size
    return -(-longest // multiple) * multiple


def _settings(given: TrainedRoleConfig, defaults: Defaults, denominator: str, longest: int) -> UpdateSettings:
    limits = defaults.limits
    if limits is None or given.has_limits:
        limits = _limits(given, longest)
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


def _limits(given: TrainedRoleConfig, longest: int) -> tuple[MicroBatchLimit, MicroBatchLimit]:
    """Of training, by default one trajectory or the tokens of the longest, and of the forward-only pass, whose own may
    be null: as in training."""
    kind, least = ("tokens", longest) if given.use_dynamic_bsz else ("trajectories", 1)
    field, most = given.training_limit()
    own_field, own = given.forward_only_limit()
    limit = MicroBatchLimit(**{kind: most or least}, field=f"{given.role}.{field}")
    return limit, limit if own is None else MicroBatchLimit(**{kind: own}, field=f"{given.role}.{own_field}")
