"""What every rollout engine does: token ids in, trajectories out, new weights taken in between."""

from dataclasses import dataclass
from typing import Protocol

from mppo.batch.trajectory import Trajectory
from mppo.weights.live_weights import LiveWeights


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One answer asked for."""

    index: int
    """Place in the global batch of the step."""
    group: int
    """Which prompt of the step."""
    prompt: tuple[int, ...]
    """Token ids."""
    seed: tuple[int, ...]
    """What its random numbers are drawn from: the same request gets the same answer on any rank."""


class RolloutEngine(Protocol):
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Trajectory]:
        """Answer the requests of this rank, in order. Log-probs are temperature-scaled and ignore top-p and top-k."""
        ...

    def update_weights(self, weights: LiveWeights, version: int) -> None:
        """Take in the trainer's weights, by a plan from their layout to the engine's own. Collective."""
        ...
