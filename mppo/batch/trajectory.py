"""One rollout: what the engine read and wrote, token by token."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from mppo.errors import DataError


@dataclass
class Trajectory:
    """A prompt and what followed, in *token* coordinates: entry i of a vector is about token i.

    The shift to state coordinates (entry t is about predicting token t+1) happens when it is packed.
    """

    index: int
    """Place in the global batch of the step: prompt group times samples per prompt plus sample."""
    group: int
    """Which prompt of the step it answers."""
    tokens: Tensor
    """`[L]` long: prompt and response."""
    action_mask: Tensor
    """`[L]` bool: token i was sampled by the policy; False for the prompt and for tool output."""
    rollout_log_probs: Tensor
    """`[L]` float32: log-prob of token i under the engine's policy; 0 where it is not an action."""
    finish_reason: str = "stop"
    """`stop`, `length` or `abort`."""
    weight_version: int = 0
    """The version of the weights that generated it."""
    reward: float = 0.0
    """The outcome reward; it is given at the last action."""
    accuracy: float = 0.0
    """What validation reports of it."""
    token_rewards: Tensor | None = None
    """`[L]` float32: rewards of single actions, in addition to the outcome."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, as the reward function reported them."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_reward(self) -> float:
        """The outcome and all token rewards."""
        return self.reward + (0.0 if self.token_rewards is None else float(self.token_rewards.sum()))

    def __getstate__(self) -> dict[str, Any]:
        """Tensors travel as numpy arrays, which pickle ten times faster."""
        return {k: v.numpy() if isinstance(v, Tensor) else v for k, v in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({k: torch.from_numpy(v) if isinstance(v, ndarray) else v for k, v in state.items()})

    @property
    def actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def response_length(self) -> int:
        """Tokens from the first action on, tool output included; 0 without any action."""
        actions = self.action_mask.nonzero()
        return len(self) - int(actions[0]) if len(actions) else 0

    def validate(self, vocab_size: int) -> None:
        """Raise DataError, naming the trajectory, when its vectors do not fit together or an id is out of range."""
        where = f"trajectory {self.index} (prompt {self.group})"
        for name in ("action_mask", "rollout_log_probs", "token_rewards"):
            vector = getattr(self, name)
            if vector is not None and vector.shape != self.tokens.shape:
                raise DataError(f"{where}: {name} has shape {tuple(vector.shape)}, tokens {tuple(self.tokens.shape)}")
        if self.action_mask.dtype != torch.bool:
            raise DataError(f"{where}: action_mask is {self.action_mask.dtype}; it must be bool")
        if len(self.tokens) == 0:
            raise DataError(f"{where}: no tokens")
        if bool(self.action_mask[0]):
            raise DataError(f"{where}: the first token is an action, but no state comes before it; give a prompt")
        outside = (self.tokens < 0) | (self.tokens >= vocab_size)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            raise DataError(
                f"{where}: token {at} has id {int(self.tokens[at])}, outside the vocabulary of {vocab_size}; "
                "is the tokenizer the model's own?"
            )
        if not bool(torch.isfinite(self.rollout_log_probs[self.action_mask]).all()):
            raise DataError(f"{where}: the engine returned a log-prob that is not finite")
        rewards = self.token_rewards if self.token_rewards is not None else torch.zeros(0)
        if not (math.isfinite(self.reward) and bool(torch.isfinite(rewards).all())):
            raise DataError(f"{where}: a reward is not finite")
