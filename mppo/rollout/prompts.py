"""Prompts: read from JSONL or Parquet, or generated; tokenised once; drawn in an order fixed by seed and step."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from jinja2.exceptions import TemplateError

from mppo.config import DataConfig, PromptSource
from mppo.errors import DataError
from mppo.rollout.generators import GENERATORS


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: tuple[int, ...]
    ground_truth: Any
    fields: dict[str, Any] = field(default_factory=dict)
    """The whole row it came from."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts in memory. The order of draws is a pure function of the seed and of how many batches were drawn."""

    prompts: list[Prompt]
    skipped: int = 0
    """Prompts left out because they were too long."""

    def __len__(self) -> int:
        return len(self.prompts)

    def draw(self, batch: int, count: int, seed: int | None) -> list[Prompt]:
        """The `count` prompts of the `batch`th batch drawn (from 0): epoch after epoch, each in an order of its own.

        `seed=None`: in the order of the files.
        """
        size = len(self.prompts)
        places = [divmod(place, size) for place in range(batch * count, (batch + 1) * count)]
        orders = {epoch: self._order(epoch, seed) for epoch in {epoch for epoch, _ in places}}
        return [self.prompts[orders[epoch][offset]] for epoch, offset in places]

    def _order(self, epoch: int, seed: int | None) -> list[int]:
        order = list(range(len(self.prompts)))
        if seed is not None:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        return order


def load_prompts(source: PromptSource, where: str, data: DataConfig, tokenizer: Any, vocab_size: int) -> PromptSet:
    """Read and tokenise a source; `where` is its place in the configuration.

    Raises DataError for a file that is missing or unreadable, a row without prompt or answer, a prompt that is too
    long (unless those are skipped) or has ids outside the vocabulary, and an empty set.
    """
    rows = _rows(source, where)
    prompts, skipped = [], 0
    for number, row in enumerate(rows):
        for key in (data.prompt_key, data.answer_key):
            if row.get(key) is None:
                raise DataError(f"{where}: row {number} has no field {key!r}; it has {', '.join(sorted(row))}")
        text, ids = _tokenise(row[data.prompt_key], tokenizer, f"{where}: row {number}")
        if len(ids) > data.max_prompt_length:
            if data.overlong_prompts == "error":
                raise DataError(
                    f"{where}: row {number} has a prompt of {len(ids)} tokens, over data.max_prompt_length="
                    f"{data.max_prompt_length}; raise that, or set data.overlong_prompts=skip"
                )
            skipped += 1
            continue
        if not ids or max(ids) >= vocab_size:
            raise DataError(
                f"{where}: row {number} has {'no tokens' if not ids else f'token id {max(ids)}'};"
                f" ids must be below the model's vocabulary of {vocab_size}"
            )
        prompts.append(Prompt(text, tuple(ids), row[data.answer_key], row))
    if not prompts:
        raise DataError(f"{where}: no prompts to use ({len(rows)} rows, {skipped} skipped as too long)")
    return PromptSet(prompts, skipped)


def _rows(source: PromptSource, where: str) -> list[dict[str, Any]]:
    if bool(source.files) == bool(source.generator):
        raise DataError(f"{where}: give either files or a generator")
    if source.generator:
        return GENERATORS.get(source.generator).bind(source.options, f"{where}.options")()
    if source.options:
        raise DataError(f"{where}.options has no effect with files")
    rows: list[dict[str, Any]] = []
    for file in source.files:
        rows.extend(_read(Path(file), where))
    return rows


def _read(file: Path, where: str) -> list[dict[str, Any]]:
    formats = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    if not file.is_file():
        raise DataError(f"{where}.files: {file}: no such file")
    if file.suffix not in formats:
        raise DataError(f"{where}.files: {file}: the name must end with {', '.join(formats)}")
    if not file.stat().st_size:
        return []
    try:
        return load_dataset(formats[file.suffix], data_files=str(file), split="train").to_list()
    except (DatasetGenerationError, ValueError) as error:
        raise DataError(f"{where}.files: {file} cannot be read: {error.__cause__ or error}") from error


def _tokenise(prompt: Any, tokenizer: Any, where: str) -> tuple[str, list[int]]:
    """A text as it stands; chat messages through the tokenizer's template, with the opening of the answer."""
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt)["input_ids"]
    if not tokenizer.chat_template:
        raise DataError(f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template")
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except (TypeError, ValueError, KeyError, TemplateError) as error:
        raise DataError(
            f"{where}: the prompt is neither a text nor chat messages {{role, content}}: {error}"
        ) from error
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]
