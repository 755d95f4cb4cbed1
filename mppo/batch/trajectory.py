"""Trajectories: what the policy read and wrote, under a name that never changes; and what is said of them."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from mppo.errors import DataError


@dataclass(frozen=True, order=True)
class TrajectoryId:
    """The name of a trajectory, given before it is generated. It survives retries, restarts and other layouts."""

    prompt: int
    """Number of the prompt in the run. It only grows, and is fixed when the prompt is drawn."""
    sample: int
    """Which answer to that prompt."""
    part: int = 0
    """Which trajectory of the session that gave the answer; a session may give several."""

    def seed(self, run_seed: int) -> tuple[int, ...]:
        """What the random numbers of its sampling are drawn from."""
        return (run_seed, self.prompt, self.sample, self.part)

    def __str__(self) -> str:
        part = f", part {self.part}" if self.part else ""
        return f"prompt {self.prompt}, sample {self.sample}{part}"


@dataclass(frozen=True)
class Span:
    """Tokens `[start, stop)` of a trajectory that one version of the weights wrote."""

    start: int
    stop: int
    weight_version: int
    """Actor updates before it."""


@dataclass(frozen=True)
class Turn:
    """Tokens `[start, stop)` of a trajectory that one call of the model wrote."""

    start: int
    stop: int


class Status(StrEnum):
    """How the last turn of a trajectory ended."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """Cut at the maximum response length."""
    ABORTED = "aborted"
    """Given up by the engine: at a deadline, or for new weights. It never trains."""


class Purpose(StrEnum):
    """What a trajectory is generated for."""

    SAMPLE = "sample"
    """To be trained on."""
    BASELINE = "baseline"
    """Greedy: its reward is compared with that of the samples of its group. It does not train."""
    VALIDATION = "validation"
    """To a held-out prompt."""


@dataclass(frozen=True)
class Trajectory:
    """A prompt and what followed, in *token* coordinates: entry i of a vector is about token i.

    The shift to state coordinates (entry t is about predicting token t+1) happens when it is packed.
    """

    uid: TrajectoryId
    token_ids: Tensor
    """`[L]` long: prompt and response."""
    action_mask: Tensor
    """`[L]` bool: token i was sampled by the policy; False for the prompt and for tool output."""
    rollout_log_probs: Tensor
    """`[L]` float32: log-prob of token i under the engine's policy; 0 where it is not an action."""
    spans: tuple[Span, ...] = ()
    """Which weights wrote which tokens, in order."""
    turns: tuple[Turn, ...] = ()
    status: Status = Status.FINISHED
    purpose: Purpose = Purpose.SAMPLE

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def group(self) -> int:
        """The answers to one prompt of the run form a group, of any size."""
        return self.uid.prompt

    @property
    def action_count(self) -> int:
        """Length of the response; output of tools is none of it."""
        return int(self.action_mask.sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first action."""
        return int(self.action_mask.long().argmax()) if bool(self.action_mask.any()) else len(self)

    @property
    def action_ids(self) -> list[int]:
        """Ids of the tokens that the policy wrote."""
        return self.token_ids[self.action_mask].tolist()

    def validate(self, vocab_size: int) -> None:
        """Raise DataError, naming the trajectory, when its vectors do not fit together or an id is out of range."""
        where = f"trajectory of {self.uid}"
        for name in ("action_mask", "rollout_log_probs"):
            vector = getattr(self, name)
            if vector.shape != self.token_ids.shape:
                raise DataError(
                    f"{where}: {name} has shape {tuple(vector.shape)}, token_ids {tuple(self.token_ids.shape)}"
                )
        if self.action_mask.dtype != torch.bool:
            raise DataError(f"{where}: action_mask is {self.action_mask.dtype}; it must be bool")
        if len(self.token_ids) == 0:
            raise DataError(f"{where}: no tokens")
        if bool(self.action_mask[0]):
            raise DataError(f"{where}: the first token is an action, but no state comes before it; give a prompt")
        outside = (self.token_ids < 0) | (self.token_ids >= vocab_size)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            raise DataError(
                f"{where}: token {at} has id {int(self.token_ids[at])}, outside the vocabulary of {vocab_size}; "
                "is the tokenizer the model's own?"
            )
        if not bool(torch.isfinite(self.rollout_log_probs[self.action_mask]).all()):
            raise DataError(f"{where}: the engine returned a log-prob that is not finite")
        stretches: tuple[Span | Turn, ...] = (*self.spans, *self.turns)
        for what in stretches:
            if not 0 <= what.start <= what.stop <= len(self):
                raise DataError(f"{where}: {what} does not lie within its {len(self)} tokens")


@dataclass(frozen=True)
class Judgement:
    """What a reward function says of a trajectory."""

    uid: TrajectoryId
    score: float | None
    """The outcome reward, given at the last action; None: the reward function abstains, and it does not train."""
    accuracy: float = 0.0
    """What validation reports of it."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    token_rewards: Tensor | None = None
    """`[L]` float32: rewards of single tokens, in addition to the outcome."""
    source: str | None = None
    """The data source whose reward judged it, where rewards differ by it."""

    @property
    def abstains(self) -> bool:
        return self.score is None

    @property
    def total_reward(self) -> float:
        """The outcome and all token rewards; 0 if it abstains."""
        return (self.score or 0.0) + (0.0 if self.token_rewards is None else float(self.token_rewards.sum()))

    def validate(self, length: int) -> None:
        """Raise DataError, naming the trajectory, for a reward that does not fit its `length` or is not finite."""
        rewards = torch.zeros(length) if self.token_rewards is None else self.token_rewards
        if rewards.shape != (length,):
            raise DataError(
                f"judgement of {self.uid}: token_rewards has shape {tuple(rewards.shape)}, for {length} tokens"
            )
        if not (math.isfinite(self.score or 0.0) and bool(torch.isfinite(rewards).all())):
            raise DataError(f"judgement of {self.uid}: a reward is not finite")


@dataclass(frozen=True)
class Answer:
    """A trajectory and what is said of it."""

    trajectory: Trajectory
    judgement: Judgement

    @property
    def trains(self) -> bool:
        """Whether it may be trained on at all."""
        is_sample = self.trajectory.purpose == Purpose.SAMPLE
        return is_sample and self.trajectory.status != Status.ABORTED and not self.judgement.abstains
