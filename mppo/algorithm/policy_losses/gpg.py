"""GPG, 2504.02546: the plain policy gradient, without an anchor."""

from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES, PolicyInputs, TokenLosses


@POLICY_LOSSES.register("gpg", loss_agg_mode="token-mean")
def gpg(x: PolicyInputs) -> TokenLosses:
    """`-A log p`"""
    return TokenLosses(-x.advantages * x.log_probs)
