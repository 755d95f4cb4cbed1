"""A policy loss that goes wrong in the midst of training, in the ways in which users' do."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mppo.algorithm.policy_losses import PolicyInputs, TokenLosses


@dataclass(frozen=True)
class Trouble:
    how: str = "raise"
    """`raise`, `loss` (not finite) or `gradient` (not finite, of a finite loss)."""
    call: int = 3
    """Which call of a rank in training goes wrong; from that one on, with `stays`."""
    stays: bool = False
    while_there: str = ""
    """Nothing goes wrong without this file."""


def troubled(x: PolicyInputs, config: Trouble) -> TokenLosses:
    """The gradient of the policy, but for the second rank and some calls."""
    loss = -x.advantages * x.log_probs
    if not dist.is_initialized() or dist.get_rank() != 1 or not Path(config.while_there).exists():
        return TokenLosses(loss)
    CALLS["here"] += 1
    if CALLS["here"] == config.call or (config.stays and CALLS["here"] > config.call):
        if config.how == "raise":
            raise RuntimeError("this rank alone")
        if config.how == "loss":
            return TokenLosses(loss * torch.nan)
        return TokenLosses(loss + (x.log_probs - x.log_probs.detach()).abs().sqrt())
    return TokenLosses(loss)


troubled.config = Trouble
CALLS: Counter[str] = Counter()
