"""The typed configuration. Every field is documented here, validated in `__post_init__`, and read by the code.

Names follow the field's usage (verl's knobs, Megatron's parallel sizes). Knobs of one loss or one estimator are
not here but in the dataclass registered with it; they are given under `actor.policy_loss` and `algorithm.adv_options`.
"""

from dataclasses import dataclass, field
from typing import Any

from mppo.errors import ConfigError


def _positive(where: str, **values: int | float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:  # so that NaN is refused too
            raise ConfigError(f"{where}.{name} is {value}; it must be greater than 0")


def _not_negative(where: str, **values: int | float | None) -> None:
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"{where}.{name} is {value}; it must not be negative")


def _one_of(where: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(choices)}")


@dataclass
class ParallelConfig:
    """How the model is cut. What is left of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks of each pipeline stage, for the interleaved schedule; null: one."""
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    timeout_minutes: int = 30
    """How long a collective may wait for a rank."""

    def __post_init__(self):
        _positive(
            "parallel",
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            timeout_minutes=self.timeout_minutes,
        )
        if self.virtual_pipeline_model_parallel_size == 1:
            self.virtual_pipeline_model_parallel_size = None
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                "parallel.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size of at least 2"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("parallel.sequence_parallel has no effect at tensor_model_parallel_size=1; unset it")
        if self.context_parallel_size > 1:
            raise ConfigError("parallel.context_parallel_size: mppo has no context parallelism; set it to 1")


@dataclass
class PromptSource:
    """Where prompts come from: files, or a generator."""

    files: list[str] = field(default_factory=list)
    """JSONL or Parquet files, read in this order."""
    generator: str | None = None
    """A registered generator, or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the generator."""

    @property
    def given(self) -> bool:
        return bool(self.files or self.generator)


@dataclass
class DataConfig:
    train: PromptSource = field(default_factory=PromptSource)
    val: PromptSource = field(default_factory=PromptSource)
    """Held-out prompts, answered greedily; optional."""
    prompt_key: str = "prompt"
    """Field with the prompt: a text, or chat messages (a list of {role, content})."""
    answer_key: str = "ground_truth"
    """Field with what the reward function compares with."""
    train_batch_size: int = 8
    """Prompts per training step; each is answered rollout.n times."""
    max_prompt_length: int = 1024
    """Tokens."""
    max_response_length: int = 1024
    """Tokens."""
    overlong_prompts: str = "error"
    """`error`, or `skip`: leave prompts over max_prompt_length out; their number is printed."""
    shuffle: bool = True
    """Draw a new order of prompts each epoch, from trainer.seed."""

    def __post_init__(self):
        _positive(
            "data",
            train_batch_size=self.train_batch_size,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
        )
        _one_of("data.overlong_prompts", self.overlong_prompts, ("error", "skip"))


@dataclass
class ModelSource:
    path: str | None = None
    """A Hugging Face model folder: config.json, safetensors, tokenizer."""
    preset: str | None = None
    """Instead of a folder: a small model from random initialisation."""
    preset_options: dict[str, Any] = field(default_factory=dict)
    """Fields of the preset's Hugging Face configuration to change."""
    dtype: str = "bfloat16"
    """`bfloat16` (with fp32 master weights and gradients) or `float32`."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this times the tensor-parallel size."""

    def __post_init__(self):
        if self.path is not None and self.preset is not None:
            raise ConfigError("model.path and model.preset exclude each other; unset one (model.preset=null)")
        if self.preset_options and self.preset is None:
            raise ConfigError("model.preset_options has no effect without model.preset")
        _one_of("model.dtype", self.dtype, ("bfloat16", "float32"))
        _positive("model", make_vocab_size_divisible_by=self.make_vocab_size_divisible_by)


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

    def __post_init__(self):
        _positive("optim", lr=self.lr, lr_decay_steps=self.lr_decay_steps, adam_eps=self.adam_eps)
        _not_negative(
            "optim",
            min_lr=self.min_lr,
            lr_warmup_steps=self.lr_warmup_steps,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.min_lr > self.lr:
            raise ConfigError(f"optim.min_lr={self.min_lr} is greater than optim.lr={self.lr}")
        if self.lr_decay_style != "cosine" and self.lr_decay_steps is None:
            raise ConfigError("optim.lr_decay_style has no effect without optim.lr_decay_steps")
        _one_of("optim.lr_decay_style", self.lr_decay_style, ("cosine", "linear"))
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ConfigError("optim.lr_decay_steps must be greater than optim.lr_warmup_steps")
        if self.min_lr and self.lr_decay_steps is None:
            raise ConfigError("optim.min_lr has no effect without optim.lr_decay_steps")


@dataclass
class ActorConfig:
    policy_loss: dict[str, Any] = field(default_factory=lambda: {"loss_mode": "vanilla"})
    """`loss_mode`, a registered loss or an import path, and the knobs of that loss."""
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
    """Tokens per micro-batch of one data-parallel rank: a hard limit."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """The same for the forward-only pass; null: as in training."""
    log_prob_max_token_len_per_gpu: int | None = None
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    """Report entropy even when its coefficient is 0."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference to the loss."""
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self):
        _check_batches("actor", self)
        _not_negative("actor", entropy_coeff=self.entropy_coeff, kl_loss_coef=self.kl_loss_coef)
        if self.policy_loss.get("loss_mode") is None:
            self.policy_loss.pop("loss_mode", None)
            self.policy_loss = {"loss_mode": "vanilla", **self.policy_loss}


@dataclass
class CriticConfig:
    """Read when the estimator needs a critic."""

    path: str | None = None
    """A reward-model folder (with a scalar head) to start from; null: the actor's weights and a zero head."""
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
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self):
        _positive("critic", cliprange_value=self.cliprange_value)
        _check_batches("critic", self)


def _check_batches(where: str, role: Any) -> None:
    names = {"ppo_mini_batch_size", "ppo_epochs", "loss_scale_factor"} | {
        n for n in vars(role) if n.endswith("_per_gpu")
    }
    _positive(where, **{name: getattr(role, name) for name in sorted(names)})
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
        _one_of("ref.placement", self.placement, ("host", "device"))


@dataclass
class RolloutConfig:
    n: int = 1
    """Answers per prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer; they stay in it."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer, besides the model's own end-of-text."""
    ignore_eos: bool = False
    dtype: str | None = None
    """dtype of the generating copy of the model; null: model.dtype."""
    batch_size: int = 256
    """Sequences that one process generates at a time."""

    def __post_init__(self):
        _positive("rollout", n=self.n, temperature=self.temperature, batch_size=self.batch_size)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"rollout.top_k is {self.top_k}; 0 means all tokens, otherwise give a number of them")
        if self.dtype is not None:
            _one_of("rollout.dtype", self.dtype, ("bfloat16", "float32"))


@dataclass
class RewardConfig:
    function: str = "exact_match"
    """A registered reward, or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the reward function."""


@dataclass
class KLControllerConfig:
    type: str = "fixed"
    """`fixed` or `adaptive`."""
    kl_coef: float = 0.001
    target_kl: float = 0.1
    """Read when adaptive."""
    horizon: int = 10000
    """Trajectories over which an adaptive coefficient follows; read when adaptive."""

    def __post_init__(self):
        _one_of("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        _positive("algorithm.kl_ctrl", target_kl=self.target_kl, horizon=self.horizon)
        _not_negative("algorithm.kl_ctrl", kl_coef=self.kl_coef)


@dataclass
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """A registered estimator, or `package.module:function`. It does not choose the loss."""
    adv_options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the estimator (gamma, lam, norm_adv_by_std_in_grpo, ...)."""
    use_kl_in_reward: bool = False
    """Subtract beta times the KL of the old policy to the reference from each token's reward."""
    kl_penalty: str = "kl"
    """The KL form of that."""
    kl_ctrl: KLControllerConfig = field(default_factory=KLControllerConfig)


@dataclass
class TrainerConfig:
    total_training_steps: int = 100
    seed: int = 1
    out_dir: str = "runs/default"
    """Logs, metrics, samples, curve and checkpoints."""
    val_before_train: bool = True
    test_freq: int = 0
    """Validate every so many steps, and after the last; 0: only after the last."""
    save_freq: int = 0
    """Save a checkpoint every so many steps, and after the last; 0: none."""
    save_hf: bool = True
    """Write the trained model as a Hugging Face folder, out_dir/hf, after the last step."""
    resume: bool = True
    """Go on from the newest checkpoint in out_dir, if there is one."""
    samples_per_step: int = 4
    """Generations written to out_dir/samples each step."""

    def __post_init__(self):
        _positive("trainer", total_training_steps=self.total_training_steps)
        _not_negative(
            "trainer",
            seed=self.seed,
            test_freq=self.test_freq,
            save_freq=self.save_freq,
            samples_per_step=self.samples_per_step,
        )


@dataclass
class Config:
    model: ModelSource = field(default_factory=ModelSource)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strict: bool = False
    """Turn warnings about the configuration into errors."""

    @property
    def need_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward
