"""Bypass mode: the rollout's policy is the anchor (2512.23075).

`algorithm.rollout_correction.bypass_mode` chooses this loss. Its anchor is then `rollout_log_probs`, and weights and
rejection follow from the current policy against it, over the mini-batch, before the training pass.
"""

from dataclasses import dataclass

from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.policy_losses.reinforce import reinforce
from mppo.algorithm.policy_losses.vanilla import VanillaConfig, vanilla
from mppo.errors import ConfigError


@dataclass(frozen=True)
class BypassConfig(VanillaConfig):
    loss_type: str = "ppo_clip"
    """`ppo_clip`: the vanilla loss, whose ratio is the correction; `reinforce`: importance weights correct.
    Set by `algorithm.rollout_correction.loss_type`. The clip range is read by ppo_clip."""

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ConfigError(f"loss_type is {self.loss_type!r}; choose ppo_clip or reinforce")


@POLICY_LOSSES.register("bypass_mode", config=BypassConfig, loss_agg_mode="token-mean")
def bypass_mode(x: PolicyInputs, config: BypassConfig) -> TokenLosses:
    """`ppo_clip` against the rollout's policy, or `reinforce`, which importance weights correct."""
    if config.loss_type == "ppo_clip":
        return vanilla(x, config)
    return reinforce(x)
