"""What every rank knows of all trajectories of a step: a line each, small however long they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mppo.algorithm.aggregation import BatchCounts
from mppo.batch.trajectory import Answer, Purpose, Status, TrajectoryId
from mppo.errors import DataError


@dataclass(frozen=True)
class TrajectorySummary:
    """What the rank that generated a trajectory tells all others of it."""

    uid: TrajectoryId
    length: int
    """Tokens."""
    actions: int
    """Tokens that the policy wrote: the length of the response."""
    prompt_length: int
    """Tokens before the first that the policy wrote."""
    status: Status
    purpose: Purpose
    abstains: bool
    """No reward function has judged it."""
    reward: float
    """Outcome and token rewards together, before shaping."""
    outcome: float
    accuracy: float
    parts: dict[str, float]
    """Named parts of the reward."""
    source: str | None
    """Data source of the prompt, where rewards differ by it."""
    oldest_version: int | None
    """Of the weights that wrote it; None where nothing was written."""
    mean_version: float
    """Of the weights that wrote it, over its actions."""

    @classmethod
    def of(cls, answer: Answer) -> "TrajectorySummary":
        trajectory, judgement = answer.trajectory, answer.judgement
        written = [(s.stop - s.start, s.weight_version) for s in trajectory.spans if s.stop > s.start]
        count = sum(tokens for tokens, _ in written)
        return cls(
            uid=trajectory.uid,
            length=len(trajectory),
            actions=trajectory.action_count,
            prompt_length=trajectory.prompt_length,
            status=trajectory.status,
            purpose=trajectory.purpose,
            abstains=judgement.abstains,
            reward=judgement.total_reward,
            outcome=judgement.score or 0.0,
            accuracy=judgement.accuracy,
            parts=judgement.parts,
            source=judgement.source,
            oldest_version=min((version for _, version in written), default=None),
            mean_version=sum(tokens * version for tokens, version in written) / max(count, 1),
        )

    @property
    def trains(self) -> bool:
        """Whether it is part of the batch of the step; see `Answer.trains`."""
        return self.purpose == Purpose.SAMPLE and self.is_judged

    @property
    def is_judged(self) -> bool:
        """Whether it was answered to the end and got a reward."""
        return self.status != Status.ABORTED and not self.abstains


@dataclass(frozen=True)
class LeftOut:
    """Trajectories that were generated for the step and do not train."""

    aborted: int = 0
    abstained: int = 0
    without_baseline: int = 0
    """The greedy answer that they are compared with was aborted, or got no reward."""


@dataclass(frozen=True)
class TrajectoryTable:
    """The trajectories of a step, in the order of their names, which gives each its index; the same on every rank."""

    summaries: list[TrajectorySummary]
    rank_of: list[int]
    """The data-parallel rank that holds each now, and trains it."""
    kept: list[int]
    """Of each the actions that train: those that are neither rejected nor masked."""
    baselines: dict[int, float] | None = None
    """Total reward of the greedy answer to a prompt, by the prompt's number; None where none are asked for."""
    left_out: LeftOut = LeftOut()

    def __len__(self) -> int:
        return len(self.summaries)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [summary.length for summary in self.summaries]

    @cached_property
    def actions(self) -> list[int]:
        """Actions of each."""
        return [summary.actions for summary in self.summaries]

    @cached_property
    def outcomes(self) -> list[float]:
        return [summary.outcome for summary in self.summaries]

    @cached_property
    def groups(self) -> list[int]:
        """The group of each, numbered 0, 1, 2, ... in the order of the prompts' numbers."""
        numbers = {prompt: number for number, prompt in enumerate(sorted(set(self.prompts)))}
        return [numbers[prompt] for prompt in self.prompts]

    @property
    def prompts(self) -> list[int]:
        """The number of the prompt of each."""
        return [summary.uid.prompt for summary in self.summaries]

    @property
    def prompt_count(self) -> int:
        return len(set(self.prompts))

    @cached_property
    def truncated(self) -> list[bool]:
        """Which were cut at the maximum response length."""
        return [summary.status == Status.TRUNCATED for summary in self.summaries]

    @property
    def reward_parts(self) -> dict[str, list[float]]:
        """The parts of the reward that every trajectory has."""
        given = [summary.parts for summary in self.summaries]
        return {name: [parts[name] for parts in given] for name in sorted(set(given[0]).intersection(*given))}

    @property
    def reward_baselines(self) -> list[float] | None:
        """The reward of the greedy answer to the prompt of each; None where no greedy answers are given."""
        if self.baselines is None:
            return None
        return [self.baselines[summary.uid.prompt] for summary in self.summaries]

    def counts(self, indices: Sequence[int], denominator: str) -> BatchCounts:
        """Of a mini-batch: all actions (`loss_mask`), or those that train (`kept`)."""
        of = self.kept if denominator == "kept" else self.actions
        counted = [of[i] for i in indices]
        return BatchCounts(sum(counted), sum(n > 0 for n in counted))


def in_order_of_names(summaries: list[TrajectorySummary]) -> list[TrajectorySummary]:
    """Those that train, in the order of their names. Raises DataError for a name that occurs twice, and for none."""
    chosen = sorted((s for s in summaries if s.trains), key=lambda s: s.uid)
    for one, next_one in pairwise(chosen):
        if one.uid == next_one.uid:
            raise DataError(f"two trajectories have the name {one.uid}; number the parts of a session")
    if not chosen:
        raise DataError(
            f"none of the {len(summaries)} trajectories of this step can train: all were aborted or got no reward"
        )
    return chosen
