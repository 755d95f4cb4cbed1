"""The prompts of a run, numbered: epoch after epoch, each in an order of its own that follows from the seed."""

import random
from array import array
from collections.abc import Sequence
from typing import Any

from mppo.config import DataConfig, PromptSource
from mppo.errors import DataError
from mppo.rollout.prompt_reader import Prompt, PromptReader
from mppo.rollout.prompt_rows import Rows, read_rows


class PromptSet(Sequence[Prompt]):
    """The prompts of a source, in the order of its rows. Each is tokenised when it is asked for."""

    def __init__(self, rows: Rows, reader: PromptReader):
        """Goes through all rows once. Raises DataError for what `PromptReader.overlong_rows` refuses."""
        overlong = reader.overlong_rows(rows)
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
    `random.Random(f"{seed}/{epoch}").shuffle` of the set's; without a seed it is the set's own.
    """

    def __init__(self, prompts: PromptSet, seed: int | None):
        self.prompts, self.seed = prompts, seed
        self.next_number = 0
        self._epoch: int | None = None
        self._order: Sequence[int] = range(len(prompts))

    def draw(self, count: int) -> dict[int, Prompt]:
        """The next `count` prompts by their numbers."""
        drawn = {number: self[number] for number in range(self.next_number, self.next_number + count)}
        self.next_number += count
        return drawn

    def __getitem__(self, number: int) -> Prompt:
        """The prompt of a number, drawn already or not."""
        epoch, offset = divmod(number, len(self.prompts))
        return self.prompts[self._order_of(epoch)[offset]]

    def state_dict(self) -> dict[str, Any]:
        return {"next_number": self.next_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_number = int(state["next_number"])

    def _order_of(self, epoch: int) -> Sequence[int]:
        """Made once an epoch: to shuffle a million takes most of a second."""
        if self.seed is not None and epoch != self._epoch:
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch, self._order = epoch, array("q", order)
        return self._order


def load_prompts(source: PromptSource, where: str, data: DataConfig, tokenizer: Any, vocab_size: int) -> PromptSet:
    """Read and check a source; `where` is its place in the configuration.

    Raises DataError for a file that is missing or unreadable, a row without prompt or answer, a prompt that is too
    long (unless those are skipped) or has ids outside the vocabulary, and an empty set.
    """
    rows = read_rows(source, where)
    prompts = PromptSet(rows, PromptReader(where, data, tokenizer, vocab_size))
    if not prompts:
        raise DataError(f"{where}: no prompts to use ({len(rows)} rows, {prompts.skipped} skipped as too long)")
    return prompts
