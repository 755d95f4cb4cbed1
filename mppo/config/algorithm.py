"""Advantages, the KL in the reward, and the rollout correction."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mppo.config.checks import not_negative, one_of, positive
from mppo.config.run_facts import RunFacts, Unread


@dataclass
class KLControllerConfig:
    """The coefficient of the KL in the reward."""

    type: str = "fixed"
    """`fixed` or `adaptive`."""
    kl_coef: float = 0.001
    """The coefficient; where adaptive, the one of the first step."""
    target_kl: float = 0.1
    """KL per token that an adaptive coefficient steers to."""
    horizon: int = 10000
    """Trajectories over which an adaptive coefficient follows."""

    def __post_init__(self):
        one_of("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        positive("algorithm.kl_ctrl", target_kl=self.target_kl, horizon=self.horizon)
        not_negative("algorithm.kl_ctrl", kl_coef=self.kl_coef)

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.type == "fixed":
            yield Unread("target_kl", "algorithm.kl_ctrl.type is fixed")
            yield Unread("horizon", "algorithm.kl_ctrl.type is fixed")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, 2503.14476): leave out prompts whose answers are all worth the same, and draw more."""

    enable: bool = False
    """Whether prompts are left out at all."""
    metric: str = "reward"
    """What must differ within a group: `reward` or `accuracy`."""
    max_num_gen_batches: int = 4
    """Batches of prompts drawn for one step at most. If there are still too few groups with signal, groups without
    fill the step up; both numbers are reported."""

    def __post_init__(self):
        one_of("algorithm.filter_groups.metric", self.metric, ("reward", "accuracy"))
        positive("algorithm.filter_groups", max_num_gen_batches=self.max_num_gen_batches)

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if not self.enable:
            yield Unread("metric", "algorithm.filter_groups.enable is off")
            yield Unread("max_num_gen_batches", "algorithm.filter_groups.enable is off")
        if self.max_num_gen_batches == 1:
            yield Unread("enable", "max_num_gen_batches=1 draws none anew")
        if run.answers_per_prompt == 1:
            yield Unread("enable", "with rollout.n=1 nothing differs within a group")


@dataclass
class AlgorithmConfig:
    """What rewards are made into: advantages, and which answers train."""

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

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if not run.reads_rewards:
            yield Unread("use_kl_in_reward", f"{run.adv_estimator} reads the parts of the reward, not the whole")
        if not self.use_kl_in_reward:
            yield Unread("kl_penalty", "algorithm.use_kl_in_reward is off")
            yield Unread("kl_ctrl", "algorithm.use_kl_in_reward is off")
        if not run.answers_may_end:
            yield Unread("overlong_masking", "rollout.ignore_eos=true lets no answer end, so nothing would train")
