"""What a diagnosis may ask of the trainer beyond the evidence: scores as they would be if something were otherwise."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor


class Head(StrEnum):
    EXACT = "exact"
    """Logits in float32, over the vocabulary without padding."""
    BFLOAT16 = "bfloat16"
    """Hidden states and weight are rounded to bfloat16, and so are the logits."""
    PADDED = "padded"
    """Rows of padding, as many as the trainer's layout has, are words like others."""
    EMBEDDING = "embedding"
    """The projection is the embedding."""


@dataclass(frozen=True)
class Change:
    """How the trainer's model is to differ from what it is, for one pass."""

    temperature: float = 1.0
    head: Head = Head.EXACT
    rope_theta: float | None = None
    rms_norm_eps: float | None = None


@dataclass(frozen=True)
class Likelihoods:
    """How likely each token was among all words, `[L]` for each trajectory; 0 for the first token."""

    mass: list[Tensor]
    """The probability of all words that are at least as likely as it."""
    rank: list[Tensor]
    """How many those are."""
    top: list[Tensor]
    """The probability of the `k` likeliest words."""


class Hypotheses(Protocol):
    """Collective: every rank asks the same in the same order. Trajectories are in the order of the evidence."""

    def score(self, change: Change) -> list[Tensor]:
        """`[L]` each: the trainer's log-probs at all tokens but the first, where it is 0."""
        ...

    def likelihoods(self, temperature: float, k: int = 0) -> Likelihoods:
        """By the trainer, at that temperature."""
        ...

    def parameter(self, name: str) -> Tensor:
        """`<tp rank>/<parameter>`, as the plan says that a worker holds it."""
        ...
