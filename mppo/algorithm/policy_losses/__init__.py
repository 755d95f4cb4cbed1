"""Policy losses by name. A loss takes `PolicyInputs` and its configuration; it returns token losses, never a mean."""

from mppo.algorithm.policy_losses import vanilla  # noqa: F401  (registers)
from mppo.algorithm.policy_losses.base import POLICY_LOSSES, PolicyInputs, TokenLosses, anchor_statistics

__all__ = ["POLICY_LOSSES", "PolicyInputs", "TokenLosses", "anchor_statistics"]
