"""The typed configuration. Every field is documented at its definition, validated in `__post_init__`, and read by the
code; which fields a run would not read each class says in `unread` (see `run_facts`).

Names follow the field's usage (verl's knobs, Megatron's parallel sizes). Knobs of one loss or one estimator are
not here but in the dataclass registered with it; they are given under `actor.policy_loss` and `algorithm.adv_options`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mppo.config.actor_critic import (
    ActorConfig,
    CriticConfig,
    CriticParallelConfig,
    OptimConfig,
    RefConfig,
    TrainedRoleConfig,
)
from mppo.config.algorithm import AlgorithmConfig, FilterGroupsConfig, KLControllerConfig
from mppo.config.checks import not_negative, one_of, positive
from mppo.config.data import (
    DataConfig,
    OverlongBufferConfig,
    PromptSource,
    RewardConfig,
    RolloutConfig,
    ValidationSamplingConfig,
)
from mppo.config.parallel import ModelSource, ParallelConfig, RecomputeConfig
from mppo.config.run_facts import RunFacts, Unread, UpdateFacts, refuse_unread
from mppo.config.sglang import DeltaConfig, SglangConfig
from mppo.errors import ConfigError

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "CriticParallelConfig",
    "DeltaConfig",
    "DataConfig",
    "FilterGroupsConfig",
    "KLControllerConfig",
    "ModelSource",
    "OptimConfig",
    "OverlongBufferConfig",
    "ParallelConfig",
    "PromptSource",
    "RecomputeConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunFacts",
    "SglangConfig",
    "TrainedRoleConfig",
    "TrainerConfig",
    "Unread",
    "UpdateFacts",
    "ValidationSamplingConfig",
    "refuse_unread",
]


@dataclass
class TrainerConfig:
    """How long a run is, what it writes and where."""

    total_training_steps: int = 100
    """A training step answers a batch of prompts and trains on the answers."""
    seed: int = 1
    """Of sampling, of the order of prompts and of mini-batches, and of a model from random initialisation."""
    out_dir: str = "runs/default"
    """Logs, metrics, samples, curve and checkpoints."""
    val_before_train: bool = True
    """Validate before the first step."""
    test_freq: int = 0
    """Validate every so many steps, and after the last; 0: only after the last."""
    save_freq: int = 0
    """Save a checkpoint every so many steps, and after the last; 0: only where a step is refused."""
    critic_warmup: int = 0
    """Training steps at the start that update the critic only."""
    save_hf: bool = True
    """Write the trained model as a Hugging Face folder, out_dir/hf, after the last step."""
    save_hf_freq: int = 0
    """Write it every so many steps too, as out_dir/hf_step_N; 0: only after the last."""
    resume: bool = True
    """Go on from the newest checkpoint in out_dir, if there is one."""
    resume_changed: bool = False
    """Go on even where a field differs from the checkpoint's that a run would train otherwise with; what differs is
    printed."""
    keep_checkpoints: int | None = None
    """The newest so many stay, and of those after which there was a validation the most accurate; others are deleted.
    null: all stay."""
    on_non_finite: str = "stop"
    """What becomes of an optimizer step whose loss or gradient is not finite, which is seen before the step: `stop`
    saves what was trained and ends the run, `skip` leaves the step out."""
    max_skipped_steps: int = 10
    """More optimizer steps left out in a row end the run, with on_non_finite=skip."""
    samples_per_step: int = 4
    """Generations written to out_dir/samples each step, of those that the first rank made; when a step is refused for
    want of a reward, all that have none."""

    def __post_init__(self):
        positive(
            "trainer",
            total_training_steps=self.total_training_steps,
            keep_checkpoints=self.keep_checkpoints,
            max_skipped_steps=self.max_skipped_steps,
        )
        one_of("trainer.on_non_finite", self.on_non_finite, ("stop", "skip"))
        not_negative(
            "trainer",
            seed=self.seed,
            test_freq=self.test_freq,
            save_freq=self.save_freq,
            save_hf_freq=self.save_hf_freq,
            critic_warmup=self.critic_warmup,
            samples_per_step=self.samples_per_step,
        )
        if self.resume_changed and not self.resume:
            raise ConfigError("trainer.resume_changed has no effect with trainer.resume=false; unset it")
        if self.keep_checkpoints is not None and not self.save_freq:
            raise ConfigError("trainer.keep_checkpoints has no effect with trainer.save_freq=0; set that")

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.on_non_finite == "stop":
            yield Unread("max_skipped_steps", "trainer.on_non_finite=stop ends the run at the first")
        if not run.has_critic:
            yield Unread("critic_warmup", f"algorithm.adv_estimator={run.adv_estimator} needs no critic")
        if not run.has_validation:
            yield Unread("test_freq", "data.val is not given")
            yield Unread("val_before_train", "data.val is not given")


@dataclass
class Config:
    """All that a run is told."""

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

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if not run.has_critic:
            yield Unread("critic", f"algorithm.adv_estimator={run.adv_estimator} needs no critic")
        if not self.need_reference:
            yield Unread("ref", "neither actor.use_kl_loss nor algorithm.use_kl_in_reward is on")
