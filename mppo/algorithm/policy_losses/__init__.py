"""Policy losses by name. A loss takes `PolicyInputs` and its configuration; it returns token losses, never a mean."""

from mppo.algorithm.policy_losses import (  # noqa: F401  (register)
    bypass_mode,
    cispo,
    covariance,
    dppo,
    dro,
    geo_mean,
    gpg,
    gspo,
    reinforce,
    sapo,
    vanilla,
)
from mppo.algorithm.policy_losses.loss_contract import (
    POLICY_LOSSES,
    PolicyInputs,
    PolicyLoss,
    PolicyLossTraits,
    TokenLosses,
    anchor_statistics,
    policy_loss,
)
from mppo.algorithm.policy_losses.mini_batch import MiniBatchInputs

__all__ = [
    "POLICY_LOSSES",
    "MiniBatchInputs",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyLossTraits",
    "TokenLosses",
    "anchor_statistics",
    "policy_loss",
]
