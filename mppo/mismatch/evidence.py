"""What was found out about both sides, as plain data: the same on every rank, and all that a diagnosis rests on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.batch.trajectory import Span, TrajectoryId
from mppo.megatron.model_config import ModelConfig
from mppo.rollout.engines.contract import SamplingParams

TOLERANCES = {torch.float32: 5e-4, torch.bfloat16: 0.25}
"""Nats by which log-probs of both sides may differ, by the type of the weights. Measured on clean runs of a small model
on CPU: 2.4e-6 at most in float32, 3.6e-2 in bfloat16. Larger models add up more, which is assumed, not measured."""
MEAN_SHARE = 1 / 8
"""Of the tolerance, by which they may differ on average."""


@dataclass(frozen=True)
class Call:
    """One continuation that a server wrote for a trajectory."""

    server: int
    prompt_ids: tuple[int, ...]
    written_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of `written_ids`, as reported."""
    spans: tuple[Span, ...]
    """Positions within `written_ids`."""
    cached_tokens: int
    """Of the prompt, whose keys and values came out of the prefix cache."""
    asked: SamplingParams

    @property
    def start(self) -> int:
        """Position of the first written token in the trajectory."""
        return len(self.prompt_ids)

    @property
    def stop(self) -> int:
        return len(self.prompt_ids) + len(self.written_ids)


@dataclass(frozen=True)
class Scored:
    """A trajectory as it would be trained on, and the log-probs of its tokens by whoever scored them.

    Vectors `[L]` are in token coordinates, float32 on the host; NaN where nobody scored a token.
    """

    uid: TrajectoryId
    token_ids: Tensor
    """`[L]` long."""
    action_mask: Tensor
    """`[L]` bool."""
    rollout_log_probs: Tensor
    """As the trajectory has them."""
    calls: tuple[Call, ...]
    """What the engine read and wrote, in order."""
    prefill: Tensor
    """Of the engine, reading the ids anew without any cached prefix, at temperature 1."""
    salted: Tensor
    """The same, but with the prefixes that generation used."""
    trained: Tensor
    """Of the trainer, at actions, by the head and the temperature of training."""
    reference: Tensor
    """Of the trainer at temperature 1, at all tokens but the first, by a head whose logits are exact in float32."""

    @property
    def server(self) -> int:
        return self.calls[0].server

    @property
    def asked(self) -> SamplingParams:
        return self.calls[-1].asked

    @property
    def temperature(self) -> float:
        """At which the engine is to report log-probs; those of greedy tokens are at 1."""
        return self.asked.temperature or 1.0

    @property
    def written(self) -> Tensor:
        """`[L]` bool: where tokens stand that the engine wrote."""
        written = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for call in self.calls:
            written[call.start : call.stop] = True
        return written

    @property
    def reported(self) -> Tensor:
        """`[L]`: of the engine, when it wrote the tokens; NaN elsewhere, and where the trajectory has other tokens."""
        found = torch.full((len(self.token_ids),), torch.nan)
        for call in self.calls:
            stop = min(call.stop, len(found))
            own = torch.tensor(call.written_ids[: max(stop - call.start, 0)], dtype=torch.long)
            same = self.token_ids[call.start : stop] == own
            log_probs = torch.tensor(call.log_probs[: len(own)])
            found[call.start : stop] = torch.where(same, log_probs, torch.nan)
        return found


@dataclass(frozen=True)
class ServerState:
    """What a server says of itself."""

    number: int
    url: str
    version: str
    checksums: Mapping[str, str]
    """`{"<tp rank>/<parameter>": checksum}`"""
    before: Mapping[str, str]
    """The same before the last refit; {} where there was none."""
    model: ModelConfig | None
    """As it read its folder; None where that cannot be read from here."""


@dataclass(frozen=True)
class Bucket:
    """What travelled together in a refit."""

    name: str
    server: int
    parameters: frozenset[str]
    """`<tp rank>/<parameter>` that it has a part of."""


@dataclass(frozen=True)
class Expected:
    """What the plan says that the workers of every server hold."""

    checksums: Mapping[str, str]
    """`{"<tp rank>/<parameter>": checksum}`"""
    padded: frozenset[str] = frozenset()
    """Those that have rows of padding."""
    buckets: tuple[Bucket, ...] = ()
    """Of the route by which weights travel, where it is known."""


@dataclass(frozen=True)
class Evidence:
    trajectories: tuple[Scored, ...]
    servers: tuple[ServerState, ...]
    expected: Expected
    version: int
    """Of the trainer's weights."""
    model: ModelConfig
    """The trainer's."""
    temperature: float
    """Of the head that trains."""
    tolerance: float
    """Nats."""

    def server(self, number: int) -> ServerState:
        return next(server for server in self.servers if server.number == number)
