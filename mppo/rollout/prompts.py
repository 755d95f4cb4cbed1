"""The prompts of a run, numbered: epoch after epoch, each in an order of its own that follows from the seed."""

import random
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from mppo.config import DataConfig, PromptSource
from mppo.errors import DataError
from mppo.rollout.prompt_reader import Prompt, PromptReader
from mppo.rollout.prompt_rows import Rows, read_rows


class PromptSet(Sequence[Prompt]):
    """The prompts of a source, in the order of its rows. Each is tokenised when it is asked for."""

    def __init__(self, rows: Rows, reader: PromptReader):
        """Goes through all rows once. Raises DataError for what `PromptReader.survey` refuses."""
        survey = reader.survey(rows)
        self.fingerprint, overlong = survey.fingerprint, survey.overlong
        self.skipped = len(overlong)
        """Rows left out because their prompts are too long."""
        self._rows, self._reader = rows, reader
        self._usable = array("q", (number for number in range(len(rows)) if number not in overlong))

    def __str__(self) -> str:
        return f"{len(self)} prompts" + (f", {self.skipped} skipped as too long" if self.skipped else "")

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]  # no slices
        number = self._usable[index]
        return self._reader.read(number, self._rows[number])


class PromptStream:
    """Prompts in the order in which a run answers them. Their numbers grow over the whole run.

    Number k is prompt `k mod n` of epoch `k div n`, n being the size of the set. The order of an epoch is
    `random.Random(f"{seed}/{epoch}").shuffle` of the set's; without a seed it is the set's own. Where a run goes on
    with other prompts, or another seed, numbers grow on and a new epoch begins.
    """

    def __init__(self, prompts: PromptSet, seed: int | None):
        self.prompts, self.seed = prompts, seed
        self.next_number = 0
        self.first_number = 0
        """Of the prompts of this set; smaller ones were of another."""
        self.first_epoch = 0
        """That began with it."""
        self._epoch: int | None = None
        self._order: Sequence[int] = range(len(prompts))

    def draw(self, count: int) -> dict[int, Prompt]:
        """The next `count` prompts by their numbers."""
        drawn = {number: self[number] for number in range(self.next_number, self.next_number + count)}
        self.next_number += count
        return drawn

    def __contains__(self, number: int) -> bool:
        """Whether the prompt of this number is of this set."""
        return number >= self.first_number

    def __getitem__(self, number: int) -> Prompt:
        """The prompt of a number, drawn already or not."""
        epochs, offset = divmod(number - self.first_number, len(self.prompts))
        return self.prompts[self._order_of(self.first_epoch + epochs)[offset]]

    @property
    def identity(self) -> str:
        """Of the prompts and their orders."""
        return f"{self.prompts.fingerprint}/{self.seed}"

    def state_dict(self) -> dict[str, Any]:
        epoch = self.first_epoch + (self.next_number - self.first_number) // len(self.prompts)
        return {
            "next_number": self.next_number,
            "first_number": self.first_number,
            "first_epoch": self.first_epoch,
            "epoch": epoch,
            "identity": self.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_number = int(state["next_number"])
        if state["identity"] == self.identity:
            self.first_number, self.first_epoch = int(state["first_number"]), int(state["first_epoch"])
        else:
            self.first_number, self.first_epoch = self.next_number, int(state["epoch"]) + 1

    @property
    def note(self) -> str | None:
        """What to say of prompts that are not those that the run began with."""
        if not self.first_number:
            return None
        return (
            f"from number {self.first_number} on prompts are those of data.train and trainer.seed as given now, in"
            f" epoch {self.first_epoch}: before it they were others"
        )

    def _order_of(self, epoch: int) -> Sequence[int]:
        """Made once an epoch: to shuffle a million takes most of a second."""
        if self.seed is not None and epoch != self._epoch:
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch, self._order = epoch, array("q", order)
        return self._order


def load_prompts(
    source: PromptSource,
    where: str,
    data: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    sources: Collection[str] = (),
) -> PromptSet:
    """Read and check a source; `where` is its place in the configuration, `sources` those with rewards of their own.

    Raises DataError for a file that is missing or unreadable, a row without prompt or answer, a prompt that is too
    long (unless those are skipped) or has ids outside the vocabulary, and an empty set.
    """
    rows = read_rows(source, where)
    prompts = PromptSet(rows, PromptReader(where, data, tokenizer, vocab_size, sources))
    if not prompts:
        raise DataError(f"{where}: no prompts to use ({len(rows)} rows, {prompts.skipped} skipped as too long)")
    return prompts
