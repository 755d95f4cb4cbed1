"""REINFORCE (Williams, 1992), with importance weights where the rollout is corrected."""

from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.statistics import TokenStatistic


@POLICY_LOSSES.register("reinforce", loss_agg_mode="seq-mean-token-sum")
def reinforce(x: PolicyInputs) -> TokenLosses:
    """`-A log p`; there is no ratio and no clip."""
    return TokenLosses(
        -x.advantages * x.log_probs,
        {"ppo_kl": TokenStatistic(x.old_log_probs - x.log_probs)},
    )
