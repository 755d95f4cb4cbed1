"""Actor, critic and reference."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mppo.config.checks import not_negative, one_of, positive
from mppo.config.parallel import PIPELINE_FIELDS, ParallelConfig, RecomputeConfig
from mppo.config.run_facts import RunFacts, Unread
from mppo.errors import ConfigError


@dataclass
class OptimConfig:
    """Adam in Megatron-core. The schedule counts optimizer steps, not training steps."""

    lr: float = 1e-6
    """The learning rate after warm-up."""
    min_lr: float = 0.0
    """Where the learning rate stops decaying."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_steps: int | None = None
    """Optimizer steps until min_lr; null: the learning rate stays at lr after warm-up."""
    lr_decay_style: str = "cosine"
    """`cosine` or `linear`; read when lr_decay_steps is set."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW (1711.05101)."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to the root of the mean of squared gradients."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    use_distributed_optimizer: bool = False
    """Spread optimizer state over data-parallel ranks."""
    state_placement: str = "device"
    """`device`, or `host`: Adam's moments and fp32 master weights are on the device only during updates. Implied by
    the role's own `placement: host`."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32; false: in the role's dtype."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the last micro-batch is still in its backward pass."""
    overlap_param_gather: bool = False
    """Gather the parameters that a distributed optimizer has updated while the next forward pass has begun."""

    def __post_init__(self):
        positive("optim", lr=self.lr, lr_decay_steps=self.lr_decay_steps, adam_eps=self.adam_eps)
        not_negative(
            "optim",
            min_lr=self.min_lr,
            lr_warmup_steps=self.lr_warmup_steps,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "optim.overlap_param_gather needs optim.use_distributed_optimizer and optim.overlap_grad_reduce"
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.min_lr > self.lr:
            raise ConfigError(f"optim.min_lr={self.min_lr} is greater than optim.lr={self.lr}")
        if self.lr_decay_style != "cosine" and self.lr_decay_steps is None:
            raise ConfigError("optim.lr_decay_style has no effect without optim.lr_decay_steps")
        one_of("optim.lr_decay_style", self.lr_decay_style, ("cosine", "linear"))
        one_of("optim.state_placement", self.state_placement, ("device", "host"))
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ConfigError("optim.lr_decay_steps must be greater than optim.lr_warmup_steps")
        if self.min_lr and self.lr_decay_steps is None:
            raise ConfigError("optim.min_lr has no effect without optim.lr_decay_steps")


@dataclass
class TrainedRoleConfig:
    """How a role that is trained goes through a batch. Each role has names of its own for its forward-only pass."""

    loss_agg_mode: str | None = None
    """How token losses add up. null: of the actor, as the paper of its loss has it; of the critic, the actor's."""
    loss_scale_factor: float | None = None
    """C of seq-mean-token-sum-norm, tokens. null: the actor's is data.max_response_length, the critic's the actor's."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step; times rollout.n trajectories. null: of the critic, the actor's."""
    ppo_epochs: int = 1
    """How often a training step goes over its batch."""
    shuffle: bool = False
    """Draw the mini-batches anew each epoch instead of cutting in order."""
    use_dynamic_bsz: bool = False
    """Micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by trajectories."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Trajectories per micro-batch of one data-parallel rank. null: one; a critic without any limit has the actor's."""
    ppo_max_token_len_per_gpu: int | None = None
    """Tokens of a micro-batch on one GPU, which under context parallelism holds a slice of it: a hard limit. null: as
    many as the longest trajectory may have."""
    placement: str = "device"
    """`device`, or `host`: weights, gradients and optimizer state are on the device only while the role works."""
    optim: OptimConfig = field(default_factory=OptimConfig)

    role: ClassVar[str]
    forward_only: ClassVar[str]
    """What the fields with the limits of its forward-only pass begin with."""

    def __post_init__(self):
        one_of(f"{self.role}.placement", self.placement, ("device", "host"))
        limits = {name: value for name, value in vars(self).items() if name.endswith("_per_gpu")}
        positive(
            self.role,
            ppo_mini_batch_size=self.ppo_mini_batch_size,
            ppo_epochs=self.ppo_epochs,
            loss_scale_factor=self.loss_scale_factor,
            **limits,
        )
        other = "micro_batch_size_per_gpu" if self.use_dynamic_bsz else "max_token_len_per_gpu"
        for name, value in limits.items():
            if value is not None and name.endswith(other):
                by_tokens = str(self.use_dynamic_bsz).lower()
                raise ConfigError(
                    f"{self.role}.{name} has no effect with {self.role}.use_dynamic_bsz={by_tokens}; unset it"
                )

    def forward_only_limit(self) -> tuple[str, int | None]:
        """The field that limits its forward-only pass, and what it says; null: as in training."""
        name = "max_token_len_per_gpu" if self.use_dynamic_bsz else "micro_batch_size_per_gpu"
        field_name = f"{self.forward_only}_{name}"
        return field_name, getattr(self, field_name)

    def training_limit(self) -> tuple[str, int | None]:
        """The field that limits its training pass, and what it says."""
        if self.use_dynamic_bsz:
            return "ppo_max_token_len_per_gpu", self.ppo_max_token_len_per_gpu
        return "ppo_micro_batch_size_per_gpu", self.ppo_micro_batch_size_per_gpu

    @property
    def has_limits(self) -> bool:
        """Whether it says how large its micro-batches are."""
        return self.use_dynamic_bsz or any(value for name, value in vars(self).items() if name.endswith("_per_gpu"))

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.role not in run.updates:
            return
        updates = run.updates[self.role]
        if not updates.reads_scale_factor:
            yield Unread(
                "loss_scale_factor", f"{self.role}.loss_agg_mode is {updates.loss_agg_mode}, which does not read it"
            )
        if updates.mini_batches == 1:
            yield Unread("shuffle", "one mini-batch has the whole batch, in any order")
        if self.placement == "host":
            yield Unread("optim.state_placement", f"{self.role}.placement=host takes the optimizer state along")
        if updates.dtype == "float32":
            yield Unread("optim.grad_reduce_in_fp32", f"the gradients of the {self.role} are in float32 anyway")


@dataclass
class ActorConfig(TrainedRoleConfig):
    """The policy that is trained."""

    ppo_mini_batch_size: int | None = 8
    policy_loss: dict[str, Any] = field(default_factory=dict)
    """`loss_mode`, a registered loss or an import path, and the knobs of that loss. Without it: `vanilla`, or what
    `algorithm.rollout_correction.bypass_mode` chooses."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Trajectories per micro-batch of forward-only passes, of the actor and of the reference; null: as in training."""
    log_prob_max_token_len_per_gpu: int | None = None
    """The same in tokens."""
    old_log_prob_pass: str = "auto"
    """`auto`: skip the pass for the PPO anchor where the anchor is the policy that is updated (one optimizer step a
    training step) and nothing reads it before; `always`: make it, and report `rollout_corr/*`."""
    entropy_coeff: float = 0.0
    """Of the entropy bonus; 0: none."""
    calculate_entropy: bool = False
    """Report entropy even when its coefficient is 0."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Of the KL in the loss."""
    kl_loss_type: str = "low_var_kl"
    """A KL form: `k1`, `k2`, `k3` and their like, or `full`, exact over the vocabulary."""

    role: ClassVar[str] = "actor"
    forward_only: ClassVar[str] = "log_prob"

    def __post_init__(self):
        super().__post_init__()
        if self.ppo_mini_batch_size is None:
            raise ConfigError("actor.ppo_mini_batch_size is null; give the prompts of an optimizer step")
        one_of("actor.old_log_prob_pass", self.old_log_prob_pass, ("auto", "always"))
        not_negative("actor", entropy_coeff=self.entropy_coeff, kl_loss_coef=self.kl_loss_coef)

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        yield from super().unread(run)
        if not run.has_forward_only_pass:
            reason = "no pass is forward-only: neither old log-probs, a reference nor a mini-batch's preparation asks"
            yield Unread("log_prob_micro_batch_size_per_gpu", reason)
            yield Unread("log_prob_max_token_len_per_gpu", reason)
        if run.bypass_mode:
            yield Unread("old_log_prob_pass", "algorithm.rollout_correction.bypass_mode makes no such pass")
        if not self.use_kl_loss:
            yield Unread("kl_loss_coef", "actor.use_kl_loss is off")
            yield Unread("kl_loss_type", "actor.use_kl_loss is off")


@dataclass
class CriticParallelConfig:
    """What of the layout is the critic's own; process groups are those of all roles. null: as in `parallel`."""

    sequence_parallel: bool | None = None
    """Cut activations between tensor-parallel regions along the sequence."""
    virtual_pipeline_model_parallel_size: int | None = None
    """1: one model chunk of each pipeline stage, even where the actor has more."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the critic that the first stage holds."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the critic that the last stage holds."""

    def __post_init__(self):
        positive("critic.parallel", **{name: getattr(self, name) for name in PIPELINE_FIELDS})

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        for name, actors in run.actor_parallel.items():
            own = getattr(self, name)
            if own is not None and own == actors:
                yield Unread(name, f"parallel.{name} is {str(actors).lower()} already")

    def within(self, actor: ParallelConfig) -> ParallelConfig:
        """The critic's layout, given the actor's. Raises ConfigError for a field that this leaves without effect."""
        if self.sequence_parallel and actor.tensor_model_parallel_size == 1:
            raise ConfigError(
                "critic.parallel.sequence_parallel has no effect at parallel.tensor_model_parallel_size=1; unset it"
            )
        for name in PIPELINE_FIELDS:
            without_pipeline = 1 if name == "virtual_pipeline_model_parallel_size" else 0
            if (getattr(self, name) or 0) > without_pipeline and actor.pipeline_model_parallel_size == 1:
                raise ConfigError(f"critic.parallel.{name} needs parallel.pipeline_model_parallel_size of at least 2")
        return replace(actor, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass
class CriticConfig(TrainedRoleConfig):
    """Read when the estimator needs a critic."""

    path: str | None = None
    """A reward-model folder (with a scalar head) to start from, of any supported family and any sizes, with the
    actor's tokens; null: the actor's weights and a zero head."""
    parallel: CriticParallelConfig = field(default_factory=CriticParallelConfig)
    dtype: str | None = None
    """null: model.dtype."""
    recompute: RecomputeConfig | None = None
    """null: model.recompute."""
    moe_aux_loss_coeff: float | None = None
    """Coefficient of the load-balancing loss where the critic is a mixture of experts; null: the actor's."""
    cliprange_value: float = 0.5
    """How far a value may move from what it was before the updates; its loss pulls it no further."""
    ppo_infer_micro_batch_size_per_gpu: int | None = None
    """Trajectories per micro-batch of its forward-only pass; null: as in training."""
    ppo_infer_max_token_len_per_gpu: int | None = None
    """The same in tokens."""

    role: ClassVar[str] = "critic"
    forward_only: ClassVar[str] = "ppo_infer"

    def __post_init__(self):
        super().__post_init__()
        positive("critic", cliprange_value=self.cliprange_value)
        not_negative("critic", moe_aux_loss_coeff=self.moe_aux_loss_coeff)
        if self.dtype is not None:
            one_of("critic.dtype", self.dtype, ("bfloat16", "float32"))


@dataclass
class RefConfig:
    """The frozen reference, read when either KL path is on."""

    placement: str = "host"
    """`host`: in host memory, on the device only for its pass; `device`: beside the actor."""

    def __post_init__(self):
        one_of("ref.placement", self.placement, ("host", "device"))
