"""Direct reward optimisation with a quadratic pull to the anchor (shape of DRO, 2405.19107)."""

from dataclasses import dataclass

from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError


@dataclass(frozen=True)
class DroConfig:
    dro_beta: float | None = None
    """Strength of the pull; it has no default."""

    def __post_init__(self):
        if self.dro_beta is None or not self.dro_beta > 0:
            raise ConfigError(f"actor.policy_loss.dro_beta is {self.dro_beta}; dro needs a number greater than 0")


@POLICY_LOSSES.register("dro", config=DroConfig, loss_agg_mode="token-mean")
def dro(x: PolicyInputs, config: DroConfig) -> TokenLosses:
    """`-(A log p - beta / 2 d^2)`, d the log-ratio."""
    beta, d = config.dro_beta, x.log_probs - x.old_log_probs
    assert beta is not None  # which its dataclass refuses
    loss = -(x.advantages * x.log_probs - beta / 2 * d.square())
    return TokenLosses(loss, {"ppo_kl": TokenStatistic(-d)})
