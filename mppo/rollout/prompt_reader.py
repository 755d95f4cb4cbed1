"""Rows made into prompts: the text, its token ids, and what is refused."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from mppo.config import DataConfig
from mppo.errors import DataError
from mppo.rollout.prompt_rows import Row, Rows

ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class Prompt:
    text: str
    token_ids: tuple[int, ...]
    ground_truth: Any
    fields: dict[str, Any] = field(default_factory=dict)
    """The whole row it came from."""


@dataclass(frozen=True)
class PromptText:
    """The text of a row, not tokenised yet."""

    number: int
    """Of the row."""
    text: str
    add_special_tokens: bool
    """False for what a chat template wrote: it brings its own."""


@dataclass(frozen=True)
class PromptReader:
    """Makes prompts of the rows of one source. Every DataError names the row."""

    where: str
    """Place of the source in the configuration."""
    data: DataConfig
    tokenizer: Any
    vocab_size: int

    def read(self, number: int, row: Row) -> Prompt:
        """Raises DataError for a prompt that is too long, has no tokens, or has ids outside the vocabulary."""
        prompt = self._text(number, row[self.data.prompt_key])
        (token_ids,) = self._tokenise([prompt])
        if len(token_ids) > self.data.max_prompt_length:
            raise self._overlong(number, token_ids)
        self._check_ids(number, token_ids)
        return Prompt(prompt.text, tuple(token_ids), row[self.data.answer_key], row)

    def overlong_rows(self, rows: Rows) -> set[int]:
        """Go through all rows once; returns the numbers of those to be skipped as too long.

        A row is tokenised only if its text alone does not tell that it fits; so a million rows take seconds.
        Raises DataError for a row without prompt or answer, one that the chat template does not take, and, as far as
        rows are tokenised, for what `read` refuses.
        """
        overlong: set[int] = set()
        keys = (self.data.prompt_key, self.data.answer_key)
        for first, values in rows.columns(keys, ROWS_AT_A_TIME):
            texts = []
            for number, (prompt, answer) in enumerate(values, first):
                if prompt is None or answer is None:
                    raise self._incomplete(number, rows[number])
                texts.append(self._text(number, prompt))
            overlong |= self._overlong_texts([text for text in texts if not self._fits_for_sure(text)])
        return overlong

    def _overlong_texts(self, texts: list[PromptText]) -> set[int]:
        overlong = set()
        for text, token_ids in zip(texts, self._tokenise(texts), strict=True):
            if len(token_ids) <= self.data.max_prompt_length:
                self._check_ids(text.number, token_ids)
            elif self.data.overlong_prompts == "error":
                raise self._overlong(text.number, token_ids)
            else:
                overlong.add(text.number)
        return overlong

    def _fits_for_sure(self, text: PromptText) -> bool:
        """A token other than a special one stands for a byte at least, but for a space that is put in front."""
        added = 1 + self.tokenizer.num_special_tokens_to_add()
        fits = len(text.text.encode()) + added <= self.data.max_prompt_length
        return fits and bool(text.text) and self._knows_all_ids

    @cached_property
    def _knows_all_ids(self) -> bool:
        """Whether every id that the tokenizer has lies within the model's vocabulary."""
        return max(self.tokenizer.get_vocab().values(), default=0) < self.vocab_size

    def _text(self, number: int, prompt: Any) -> PromptText:
        """A text as it stands; chat messages through the tokenizer's template, with the opening of the answer."""
        if isinstance(prompt, str):
            return PromptText(number, prompt, add_special_tokens=True)
        where = f"{self.where}: row {number}"
        if not self.tokenizer.chat_template:
            raise DataError(f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template")
        try:
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except (TypeError, ValueError, KeyError, TemplateError) as error:
            raise DataError(
                f"{where}: the prompt is neither a text nor chat messages {{role, content}}: {error}"
            ) from error
        return PromptText(number, text, add_special_tokens=False)

    def _tokenise(self, texts: list[PromptText]) -> list[list[int]]:
        """In the order of the texts; many at once, over which a fast tokenizer spreads its threads."""
        token_ids: dict[int, list[int]] = {}
        for special in (True, False):
            chosen = [text for text in texts if text.add_special_tokens == special]
            if chosen:
                encoded = self.tokenizer([text.text for text in chosen], add_special_tokens=special)["input_ids"]
                token_ids |= {text.number: ids for text, ids in zip(chosen, encoded, strict=True)}
        return [token_ids[text.number] for text in texts]

    def _check_ids(self, number: int, token_ids: list[int]) -> None:
        if not token_ids or max(token_ids) >= self.vocab_size:
            raise DataError(
                f"{self.where}: row {number} has {'no tokens' if not token_ids else f'token id {max(token_ids)}'};"
                f" ids must be below the model's vocabulary of {self.vocab_size}"
            )

    def _overlong(self, number: int, token_ids: list[int]) -> DataError:
        return DataError(
            f"{self.where}: row {number} has a prompt of {len(token_ids)} tokens, over data.max_prompt_length="
            f"{self.data.max_prompt_length}; raise that, or set data.overlong_prompts=skip"
        )

    def _incomplete(self, number: int, row: Row) -> DataError:
        missing = next(key for key in (self.data.prompt_key, self.data.answer_key) if row.get(key) is None)
        return DataError(f"{self.where}: row {number} has no field {missing!r}; it has {', '.join(sorted(row))}")
