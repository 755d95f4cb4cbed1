"""The lengths of a training step: read from a file or drawn, and what the plan of micro-batches makes of them."""

import json
import random
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import exp, inf
from pathlib import Path
from statistics import NormalDist
from typing import Any

from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import assign_ranks, by_rank, plan_micro_batches
from mppo.config import DataConfig
from mppo.errors import ConfigError
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Sizes
from mppo.trainer.batches import mini_batches_of_epoch
from mppo.trainer.run_spec import UpdateSettings

SEED = 0
"""Of the order of the lengths; the same mix always gives the same step."""


@dataclass(frozen=True)
class Length:
    """Of a trajectory, in tokens."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Spread:
    """Prompts all alike, and responses log-normal round their mean."""

    prompt: int
    """Tokens, as the others."""
    response: int
    """The mean, before the longest are cut."""
    longest: int
    """Where responses are cut."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0: all alike."""

    def __post_init__(self):
        for option, value in (("--prompt-tokens", self.prompt), ("--response-tokens", self.response)):
            if value <= 0:
                raise ConfigError(f"{option} is {value}; it must be greater than 0")
        if not 0 <= self.sigma < inf:
            raise ConfigError(f"--response-sigma is {self.sigma}; it must be a number that is not negative")

    def step(self, count: int) -> list[Length]:
        """`count` trajectories: evenly spaced quantiles, so that no luck is in them, in an order that is drawn."""
        normal = NormalDist()
        scores = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
        factors = [exp(self.sigma * score - self.sigma**2 / 2) for score in scores]
        responses = [min(max(round(self.response * factor), 1), self.longest) for factor in factors]
        return _shuffled([Length(self.prompt, response) for response in responses])


@dataclass(frozen=True)
class Sample:
    """Lengths that were seen."""

    lengths: list[Length]

    @classmethod
    def read(cls, path: str, data: DataConfig) -> "Sample":
        """JSON lines `{"prompt": 123, "response": 456}`; other fields are left alone.

        Raises ConfigError that names the line, also for a length that the run would not have.
        """
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--lengths {path}: the file cannot be read: {error}") from error
        lengths = [
            _read(line, f"--lengths {path}, line {number}", data) for number, line in enumerate(lines, 1) if line
        ]
        if not lengths:
            raise ConfigError(f"--lengths {path}: the file is empty; it wants at least one length")
        return cls(lengths)

    def step(self, count: int) -> list[Length]:
        """`count` trajectories, in an order that is drawn: each line as often as any other, or once more."""
        return list(islice(cycle(_shuffled(self.lengths)), count))


Mix = Spread | Sample


def _shuffled(lengths: list[Length]) -> list[Length]:
    return random.Random(SEED).sample(lengths, len(lengths))


def check_length(length: Length, data: DataConfig, where: str) -> None:
    """Raise ConfigError for one that the run would not have."""
    for part, most in (("prompt", data.max_prompt_length), ("response", data.max_response_length)):
        if getattr(length, part) > most:
            raise ConfigError(
                f"{where}: a {part} of {getattr(length, part)} tokens, over data.max_{part}_length={most};"
                " lower the one or raise the other"
            )


def _read(line: str, where: str, data: DataConfig) -> Length:
    try:
        found: Any = json.loads(line)
        length = Length(found["prompt"], found["response"])
    except (ValueError, TypeError, KeyError):
        length = Length(-1, -1)
    if not all(type(tokens) is int and tokens > 0 for tokens in (length.prompt, length.response)):
        raise ConfigError(f'{where}: {line[:80]!r} is no {{"prompt": 123, "response": 456}} (tokens, greater than 0)')
    check_length(length, data, where)
    return length


@dataclass(frozen=True)
class Load:
    """What a mix of lengths asks of the worst rank, in the worst optimizer step of a training step."""

    tokens: int
    """Of its fullest micro-batch, after context parallelism has cut it and padding was added."""
    actions: int
    """Those of them that are projected."""
    micro_batches: int
    all_tokens: int
    """Of all micro-batches together."""
    all_actions: int
    worst_over_mean: float = 1.0
    """Workload of the heaviest data-parallel rank over that of the mean."""


def load_of(
    lengths: list[Length], settings: UpdateSettings, model: ModelConfig, sizes: Sizes, answers: int = 1
) -> Load:
    """Of a training step with trajectories of these lengths, `answers` to each prompt, planned as the trainer plans it.

    Raises DataError that names a trajectory over the token budget of a micro-batch.
    """
    padded = [sizes.padded_length(length.total) for length in lengths]
    projected = sum(length.response for length in lengths) / sum(length.total for length in lengths)
    cost = WorkloadModel.of(model, projected)
    workloads = [cost(length.total) for length in lengths]
    prompts = [index // answers for index in range(len(lengths))]
    mini_batches = mini_batches_of_epoch(prompts, settings, seed=0, step=0, epoch=0)
    rank_of = assign_ranks(mini_batches, workloads, sizes.dp)
    limit, loads = sizes.replica_limit(settings.limit), []
    for indices in mini_batches:
        parts = by_rank(indices, [rank_of[i] for i in indices], sizes.dp)
        for pieces in plan_micro_batches(parts, padded, limit, sizes.micro_batch_multiple, cost):
            loads.append(_load_of_rank([[lengths[i] for i in piece] for piece in pieces], sizes))
    fullest = max(loads, key=lambda load: (load.tokens, load.actions))
    busiest = max(loads, key=lambda load: (load.micro_batches, load.all_tokens))
    return replace(
        busiest,
        tokens=fullest.tokens,
        actions=fullest.actions,
        worst_over_mean=_worst_over_mean(mini_batches, rank_of, workloads, sizes.dp),
    )


def _load_of_rank(pieces: list[list[Length]], sizes: Sizes) -> Load:
    tokens = [_tokens(piece, sizes) for piece in pieces]
    actions = [-(-sum(length.response for length in piece) // sizes.cp) for piece in pieces]
    most, of_most = max(zip(tokens, actions, strict=True))
    return Load(most, of_most, len(pieces), sum(tokens), sum(actions))


def _tokens(piece: list[Length], sizes: Sizes) -> int:
    """On one context-parallel rank; one without trajectories is all padding."""
    tokens = sum(sizes.padded_length(length.total) for length in piece) // sizes.cp
    return max(-(-tokens // sizes.token_multiple), 1) * sizes.token_multiple


def _worst_over_mean(mini_batches: list[list[int]], rank_of: list[int], workloads: list[float], ranks: int) -> float:
    """Of the mini-batch where it is largest."""
    ratios = []
    for indices in mini_batches:
        parts = by_rank((workloads[i] for i in indices), (rank_of[i] for i in indices), ranks)
        ratios.append(max(map(sum, parts)) * ranks / sum(map(sum, parts)))
    return max(ratios)
