"""The rollout buffer: complete groups of judged answers wait here until a training step takes them.

It is one logical buffer. What a rank generated stays with that rank; which groups a step takes, all ranks agree on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mppo.algorithm.group_selection import select_groups
from mppo.errors import DataError
from mppo.rollout.prompt_group import Group, group_of, group_state
from mppo.rollout.prompt_reader import Prompt


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


class Prompts(Protocol):
    def __contains__(self, number: int) -> bool:
        """Whether the prompt with this number is known; a run that goes on with other prompts does not know the old."""
        ...

    def __getitem__(self, number: int) -> Prompt:
        """The prompt with this number in the run."""
        ...


class Buffer:
    """This rank's part of the buffer.

    With `admits` (dynamic sampling, DAPO, arXiv:2503.14476) only groups with a signal count as ready. The others wait
    aside, to fill up the step that finds too few, and are dropped once a step is taken. A group that is ready and not
    taken waits for the next step.
    """

    def __init__(
        self,
        gather: GatherNumbers,
        prompts: Prompts,
        rank: int,
        ranks: int,
        admits: Callable[[Group], bool] | None = None,
    ):
        self.gather, self._prompts, self._admits = gather, prompts, admits
        self._rank, self._ranks = rank, ranks
        self._ready: dict[int, Group] = {}
        self._silent: dict[int, Group] = {}
        self.dropped = 0
        """Groups of all ranks that a checkpoint had and that could not be taken in."""

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
        ready = [number for numbers, _ in everywhere for number in numbers]
        silent = [number for _, numbers in everywhere for number in numbers]
        selection = select_groups(ready, silent, count)
        mine = self._ready | self._silent
        groups = [mine[number] for number in selection.chosen if number in mine]
        self._ready = {number: group for number, group in self._ready.items() if number not in set(selection.chosen)}
        self._silent = {}
        return Taken(groups, len(silent), selection.used_without_signal, selection.left_over)

    def snapshot(self) -> dict[int, Group]:
        """The groups of this rank that are ready, by number."""
        return dict(self._ready)

    def put_back(self, snapshot: dict[int, Group]) -> None:
        """Hold again what a snapshot has, and nothing else."""
        self._ready, self._silent = dict(snapshot), {}

    def _numbers(self) -> list[tuple[list[int], list[int]]]:
        return self.gather((list(self._ready), list(self._silent)))

    def state_dict(self) -> dict[str, Any]:
        """The groups of this rank that are ready."""
        return self.state_of(self._ready)

    @staticmethod
    def state_of(groups: Mapping[int, Group]) -> dict[str, Any]:
        """The state of a buffer with these groups."""
        return {"groups": [group_state(group) for group in groups.values()]}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take this rank's share of the groups that all ranks of the run saved: those it would have generated.

        Groups whose prompts are not known any more are `dropped`.
        """
        everywhere = [group for state in states for group in state["groups"]]
        known = [group for group in everywhere if group["number"] in self._prompts]
        self.dropped = len(everywhere) - len(known)
        saved = [group for group in known if group["number"] % self._ranks == self._rank]
        self._ready = {group["number"]: group_of(group, self._prompts[group["number"]]) for group in saved}
        self._silent = {}
