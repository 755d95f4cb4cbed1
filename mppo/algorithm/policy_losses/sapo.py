"""SAPO, 2511.20347: a soft gate on the ratio instead of a clip."""

from dataclasses import dataclass

import torch

from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError


@dataclass(frozen=True)
class SapoConfig:
    tau_pos: float = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """Steepness of the gate elsewhere."""

    def __post_init__(self):
        for name in ("tau_pos", "tau_neg"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"actor.policy_loss.{name} is {getattr(self, name)}; it must be greater than 0")


@POLICY_LOSSES.register("sapo", config=SapoConfig, loss_agg_mode="seq-mean-token-mean")
def sapo(x: PolicyInputs, config: SapoConfig) -> TokenLosses:
    """`-(4 / tau) sigmoid(tau (r - 1)) A`: on policy its slope is that of `-r A`, away from it less."""
    A = x.advantages
    tau = torch.where(A > 0, A.new_tensor(config.tau_pos), A.new_tensor(config.tau_neg))
    gate = 4 / tau * torch.sigmoid(tau * (torch.exp(x.log_ratio) - 1))
    none = TokenStatistic(torch.zeros_like(A))
    return TokenLosses(
        -gate * A, {"pg_clipfrac": none, "pg_clipfrac_lower": none, "ppo_kl": TokenStatistic(-x.log_ratio)}
    )
