"""Advantages, the KL in the reward, and the rollout correction."""

from dataclasses import dataclass, field
from typing import Any

from mppo.config.checks import not_negative, one_of, positive


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
        one_of("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        positive("algorithm.kl_ctrl", target_kl=self.target_kl, horizon=self.horizon)
        not_negative("algorithm.kl_ctrl", kl_coef=self.kl_coef)


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, 2503.14476): leave out prompts whose answers are all worth the same, and draw more."""

    enable: bool = False
    metric: str = "reward"
    """What must differ within a group: `reward` or `accuracy`."""
    max_num_gen_batches: int = 4
    """Batches of prompts drawn for one step at most. If there are still too few groups with signal, groups without
    fill the step up; both numbers are reported."""

    def __post_init__(self):
        one_of("algorithm.filter_groups.metric", self.metric, ("reward", "accuracy"))
        positive("algorithm.filter_groups", max_num_gen_batches=self.max_num_gen_batches)


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
    rollout_correction: dict[str, Any] = field(default_factory=dict)
    """Importance weights, rejection and bypass mode; fields of RolloutCorrectionConfig, or `preset`."""
    overlong_masking: bool = False
    """Answers that were cut at max_response_length do not train (their prompts' other answers do)."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
