"""The replay buffer: finished trajectories wait here, on the rank that generated them, until a step takes them."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from mppo.batch.trajectory import Trajectory
from mppo.rollout.prompts import Prompt


@dataclass(frozen=True)
class Rollout:
    """The trajectories that one rank generated for one training step."""

    trajectories: list[Trajectory]
    prompts: dict[int, Prompt]
    """By group; all prompts of the step."""
    greedy: list[Trajectory] = field(default_factory=list)
    """Greedy answers to some of the prompts, where the estimator takes their reward as baseline; they do not train."""

    def __add__(self, other: "Rollout") -> "Rollout":
        return Rollout(self.trajectories + other.trajectories, self.prompts | other.prompts, self.greedy + other.greedy)

    def of_groups(self, groups: Collection[int]) -> "Rollout":
        """What belongs to these groups."""
        return Rollout(
            [t for t in self.trajectories if t.group in groups],
            {group: prompt for group, prompt in self.prompts.items() if group in groups},
            [t for t in self.greedy if t.group in groups],
        )


class ReplayBuffer:
    """First in, first out. Filling it ahead of the trainer is the rollout's affair."""

    def __init__(self):
        self._waiting: deque[Rollout] = deque()

    def add(self, rollout: Rollout) -> None:
        self._waiting.append(rollout)

    def sample(self) -> Rollout:
        """Take the oldest rollout. Raises IndexError when there is none."""
        return self._waiting.popleft()

    def __len__(self) -> int:
        return len(self._waiting)
