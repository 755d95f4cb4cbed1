"""What every rollout engine does: requests of token ids in, completions out, new weights taken in between."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mppo.batch.trajectory import Span, Status, TrajectoryId
from mppo.config import Config
from mppo.registry import Registry
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, and what ends an answer."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def leaves_tokens_out(self) -> bool:
        """Whether some tokens cannot be drawn that the model finds possible."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class Request:
    """One continuation asked for."""

    uid: TrajectoryId
    """The trajectory that it is for. Requests for one prompt form a group; an engine keeps them together, so that what
    they share is computed once."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: tuple[int, ...]
    """What its random numbers are drawn from. An engine that can answers the same request alike, on any rank."""
    timeout_s: float
    """After so many seconds the engine gives up and answers with what it has, as aborted."""

    @property
    def group(self) -> int:
        return self.uid.prompt


@dataclass(frozen=True)
class Completion:
    """What an engine wrote after a prompt."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of each token under the distribution that it was drawn from: temperature-scaled, with top-p and top-k over the
    tokens that they keep; of greedy ones at temperature 1, over all."""
    spans: tuple[Span, ...]
    """Which weights wrote what; positions within the completion."""
    status: Status


class RolloutEngine(Protocol):
    """All calls of a rank come from one event loop, and each ends by its deadline."""

    async def generate(self, request: Request) -> Completion:
        """Continue a prompt. Raises EngineError without weights, and after an update that failed."""
        ...

    async def update_weights(self, weights: LiveWeights, version: int) -> dict[str, float]:
        """Take in the trainer's weights, under the number of actor updates that made them, by a plan from their layout
        to the engine's own. Returns what is to be reported of it.

        Every rank of the trainer calls it at the same time. After a failure the engine answers nothing until an update
        succeeds. Raises ModelError when the weights are not the engine's.
        """
        ...

    async def sleep(self) -> None:
        """Give the memory of weights and cache to training, where they share a GPU; the next update wakes the engine.

        Every rank calls it at the same time, when no answer is being written.
        """
        ...

    async def close(self) -> None:
        """Give back what the engine holds: processes, connections, memory."""
        ...


ENGINES: Registry[Callable[[Config, PretrainedModel], RolloutEngine]] = Registry("rollout engine")
"""`(config, model) -> engine`, called on every rank; chosen by `rollout.engine`."""
