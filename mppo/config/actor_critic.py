"""Actor, critic and reference."""

from dataclasses import dataclass, field, replace
from typing import Any

from mppo.config.checks import not_negative, one_of, positive
from mppo.config.parallel import PIPELINE_FIELDS, ParallelConfig, RecomputeConfig
from mppo.errors import ConfigError


@dataclass
class OptimConfig:
    """Adam in Megatron-core. The schedule counts optimizer steps, not training steps."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_steps: int | None = None
    """Optimizer steps until min_lr; null: the learning rate stays at lr after warm-up."""
    lr_decay_style: str = "cosine"
    """`cosine` or `linear`; read when lr_decay_steps is set."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
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
class ActorConfig:
    policy_loss: dict[str, Any] = field(default_factory=dict)
    """`loss_mode`, a registered loss or an import path, and the knobs of that loss. Without it: `vanilla`, or what
    `algorithm.rollout_correction.bypass_mode` chooses."""
    loss_agg_mode: str | None = None
    """How token losses add up; null: as the paper of the loss has it."""
    loss_scale_factor: float | None = None
    """C of seq-mean-token-sum-norm, tokens; null: data.max_response_length."""
    ppo_mini_batch_size: int = 8
    """Prompts per optimizer step; times rollout.n trajectories."""
    ppo_epochs: int = 1
    shuffle: bool = False
    """Draw the mini-batches anew each epoch instead of cutting in order."""
    use_dynamic_bsz: bool = False
    """Micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by trajectories."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Trajectories per micro-batch of one data-parallel rank."""
    ppo_max_token_len_per_gpu: int | None = None
    """Tokens of a micro-batch on one GPU, which under context parallelism holds a slice of it: a hard limit."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """The same for the forward-only pass; null: as in training."""
    log_prob_max_token_len_per_gpu: int | None = None
    old_log_prob_pass: str = "auto"
    """`auto`: skip the pass for the PPO anchor where the anchor is the policy that is updated (one optimizer step a
    training step) and nothing reads it before; `always`: make it, and report `rollout_corr/*`."""
    placement: str = "device"
    """`device`, or `host`: weights, gradients and optimizer state are on the device only while the actor works."""
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    """Report entropy even when its coefficient is 0."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference to the loss."""
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self):
        check_batches("actor", self)
        one_of("actor.old_log_prob_pass", self.old_log_prob_pass, ("auto", "always"))
        one_of("actor.placement", self.placement, ("device", "host"))
        not_negative("actor", entropy_coeff=self.entropy_coeff, kl_loss_coef=self.kl_loss_coef)


@dataclass
class CriticParallelConfig:
    """What of the layout is the critic's own; process groups are those of all roles. null: as in `parallel`."""

    sequence_parallel: bool | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    """1: one model chunk of each pipeline stage, even where the actor has more."""
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None

    def __post_init__(self):
        positive("critic.parallel", **{name: getattr(self, name) for name in PIPELINE_FIELDS})

    def within(self, actor: ParallelConfig) -> ParallelConfig:
        """The critic's layout, given the actor's. Raises ConfigError for a field that this leaves without effect."""
        if self.sequence_parallel and actor.tensor_model_parallel_size == 1:
            raise ConfigError(
                "critic.parallel.sequence_parallel has no effect at parallel.tensor_model_parallel_size=1; unset it"
            )
        for name in PIPELINE_FIELDS:
            is_given = (getattr(self, name) or 0) > (name == "virtual_pipeline_model_parallel_size")
            if is_given and actor.pipeline_model_parallel_size == 1:
                raise ConfigError(f"critic.parallel.{name} needs parallel.pipeline_model_parallel_size of at least 2")
        return replace(actor, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass
class CriticConfig:
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
    loss_agg_mode: str | None = None
    """null: the actor's."""
    loss_scale_factor: float | None = None
    """null: the actor's."""
    cliprange_value: float = 0.5
    ppo_mini_batch_size: int | None = None
    """null: the actor's."""
    ppo_epochs: int = 1
    shuffle: bool = False
    use_dynamic_bsz: bool = False
    ppo_micro_batch_size_per_gpu: int | None = None
    """null, with no token limit either: the actor's limits."""
    ppo_max_token_len_per_gpu: int | None = None
    ppo_infer_micro_batch_size_per_gpu: int | None = None
    """The same for the forward-only pass; null: as in training."""
    ppo_infer_max_token_len_per_gpu: int | None = None
    placement: str = "device"
    """As the actor's."""
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self):
        positive("critic", cliprange_value=self.cliprange_value)
        one_of("critic.placement", self.placement, ("device", "host"))
        not_negative("critic", moe_aux_loss_coeff=self.moe_aux_loss_coeff)
        if self.dtype is not None:
            one_of("critic.dtype", self.dtype, ("bfloat16", "float32"))
        check_batches("critic", self)


def check_batches(where: str, role: Any) -> None:
    names = {"ppo_mini_batch_size", "ppo_epochs", "loss_scale_factor"} | {
        n for n in vars(role) if n.endswith("_per_gpu")
    }
    positive(where, **{name: getattr(role, name) for name in sorted(names)})
    by_tokens = [n for n in vars(role) if n.endswith("max_token_len_per_gpu") and getattr(role, n)]
    by_count = [n for n in vars(role) if n.endswith("micro_batch_size_per_gpu") and getattr(role, n)]
    if role.use_dynamic_bsz and by_count:
        raise ConfigError(f"{where}.{by_count[0]} has no effect with {where}.use_dynamic_bsz=true; unset it")
    if by_tokens and not role.use_dynamic_bsz:
        raise ConfigError(f"{where}.{by_tokens[0]} has no effect with {where}.use_dynamic_bsz=false; unset it")


@dataclass
class RefConfig:
    """The frozen reference, read when either KL path is on."""

    placement: str = "host"
    """`host`: in host memory, on the device only for its pass; `device`: beside the actor."""

    def __post_init__(self):
        one_of("ref.placement", self.placement, ("host", "device"))
