"""The rollout buffer: complete groups of judged answers wait here until a training step takes them.

It is one logical buffer. What a rank generated stays with that rank; which groups a step takes, all ranks agree on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mppo.batch.trajectory import Answer
from mppo.errors import DataError
from mppo.rollout.prompts import Prompt


@dataclass(frozen=True)
class Group:
    """All answers to one prompt of the run, judged: samples, and greedy baselines where the estimator wants them."""

    number: int
    """Of the prompt in the run."""
    prompt: Prompt
    answers: tuple[Answer, ...]

    @property
    def samples(self) -> list[Answer]:
        """Those that may be trained on."""
        return [answer for answer in self.answers if answer.trains]


@dataclass(frozen=True)
class Taken:
    """What a step takes: this rank's groups, and what became of all groups of the buffer."""

    groups: list[Group]
    without_signal: int
    """Groups without a signal that wait, used or not."""
    used_without_signal: int
    """Those of them that fill the step up."""
    left_over: int
    """Groups with a signal that stay for the next step."""


GatherNumbers = Callable[[tuple[list[int], list[int]]], list[tuple[list[int], list[int]]]]
"""Collective: two lists of numbers of this rank -> those of every rank."""


class Buffer:
    """This rank's part of the buffer.

    With `admits` (dynamic sampling, DAPO, arXiv:2503.14476) only groups with a signal count as ready. The others wait
    aside, to fill up the step that finds too few, and are dropped once a step is taken. A group that is ready and not
    taken waits for the next step.
    """

    def __init__(self, gather: GatherNumbers, admits: Callable[[Group], bool] | None = None):
        self.gather, self._admits = gather, admits
        self._ready: dict[int, Group] = {}
        self._silent: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        """Take in a complete group. Raises DataError for a number that waits already."""
        if group.number in self._ready or group.number in self._silent:
            raise DataError(f"prompt {group.number} of the run was answered twice")
        has_signal = self._admits is None or self._admits(group)
        (self._ready if has_signal else self._silent)[group.number] = group

    def ready(self) -> int:
        """Groups that count, on all ranks. Collective."""
        return sum(len(ready) for ready, _ in self._numbers())

    def take(self, count: int) -> Taken:
        """The oldest `count` groups, filled up with the oldest of those without a signal. Collective."""
        everywhere = self._numbers()
        ready = sorted(number for numbers, _ in everywhere for number in numbers)
        silent = sorted(number for _, numbers in everywhere for number in numbers)
        chosen, filling = ready[:count], silent[: max(count - len(ready), 0)]
        mine = self._ready | self._silent
        groups = [mine[number] for number in sorted([*chosen, *filling]) if number in mine]
        self._ready = {number: group for number, group in self._ready.items() if number not in set(chosen)}
        self._silent = {}
        return Taken(groups, len(silent), len(filling), len(ready) - len(chosen))

    def _numbers(self) -> list[tuple[list[int], list[int]]]:
        return self.gather((list(self._ready), list(self._silent)))

    def state_dict(self) -> dict[str, Any]:
        """The groups of this rank that are ready."""
        return {"groups": list(self._ready.values())}

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, ranks: int) -> None:
        """Deal the groups of all ranks of the run that saved them out to the `ranks` of this one."""
        groups = sorted((group for state in states for group in state["groups"]), key=lambda group: group.number)
        self._ready = {group.number: group for group in groups[rank::ranks]}
        self._silent = {}
