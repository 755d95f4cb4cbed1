"""The replay buffer: finished trajectories wait here, on the rank that generated them, until a step takes them."""

from collections import deque
from dataclasses import dataclass

from mppo.batch.trajectory import Trajectory
from mppo.rollout.prompts import Prompt


@dataclass(frozen=True)
class Rollout:
    """The trajectories that one rank generated for one training step."""

    trajectories: list[Trajectory]
    prompts: dict[int, Prompt]
    """By group; all prompts of the step."""


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
