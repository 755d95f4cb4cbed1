"""Rows made into prompts: the text, its token ids, and what is refused."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from mppo.config import DataConfig
from mppo.errors import DataError
from mppo.rollout.chat import ChatTemplate
from mppo.rollout.prompt_rows import Row, Rows, look_up

ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class Prompt:
    text: str
    token_ids: tuple[int, ...]
    ground_truth: Any
    fields: dict[str, Any] = field(default_factory=dict)
    """The whole row it came from."""
    source: str | None = None
    """The data source that the row names, where rewards differ by it."""


@dataclass(frozen=True)
class PromptText:
    """The text of a row, not tokenised yet."""

    number: int
    """Of the row."""
    text: str
    is_plain: bool
    """Whether the tokenizer's own beginning (BOS) goes before it; a chat template has written its own."""


@dataclass(frozen=True)
class Survey:
    """What is known of all rows of a source."""

    overlong: set[int]
    """Numbers of the rows that are skipped as too long."""
    fingerprint: str
    """Of all prompts and ground truths, in their order."""


@dataclass(frozen=True)
class PromptReader:
    """Makes prompts of the rows of one source. Every DataError names the row."""

    where: str
    """Place of the source in the configuration."""
    data: DataConfig
    tokenizer: Any
    vocab_size: int
    sources: Collection[str] = ()
    """Data sources that have a reward of their own; none: rows need not name theirs."""

    def read(self, number: int, row: Row) -> Prompt:
        """Raises DataError for a prompt that is too long, has no tokens, or has ids outside the vocabulary."""
        prompt, answer, tools, source = (look_up(row, key) if key else None for key in self.keys)
        text = self._text(number, prompt, tools)
        (token_ids,) = self._tokenise([text])
        if len(token_ids) > self.data.max_prompt_length:
            raise self._overlong(number, token_ids)
        self._check_ids(number, token_ids)
        return Prompt(text.text, tuple(token_ids), answer, row, source)

    @property
    def keys(self) -> tuple[str, str, str, str]:
        """Of prompt, ground truth, tools and data source; empty: not looked at."""
        data = self.data
        return data.prompt_key, data.answer_key, data.tools_key or "", data.source_key if self.sources else ""

    def survey(self, rows: Rows) -> Survey:
        """Go through all rows once.

        A row is tokenised only if its text alone does not tell that it fits; so a million rows take seconds.
        Raises DataError for a row without prompt or answer, one that the chat template does not take or whose data
        source has no reward, and, as far as rows are tokenised, for what `read` refuses.
        """
        overlong: set[int] = set()
        seen = blake2b(digest_size=8)
        for first, values in rows.columns(self.keys, ROWS_AT_A_TIME):
            texts = []
            for number, (prompt, answer, tools, source) in enumerate(values, first):
                if prompt is None or answer is None:
                    raise self._incomplete(number, rows[number])
                self._check_source(number, source)
                text = self._text(number, prompt, tools)
                seen.update(f"{text.text}\0{answer!r}\0".encode("utf-8", "surrogatepass"))
                texts.append(text)
            overlong |= self._overlong_texts([text for text in texts if not self._fits_for_sure(text)])
        seen.update(repr(sorted(overlong)).encode())
        return Survey(overlong, seen.hexdigest())

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
        fits = len(text.text.encode()) + 1 + len(self._beginning) <= self.data.max_prompt_length
        return fits and bool(text.text) and self._knows_all_ids

    @cached_property
    def _knows_all_ids(self) -> bool:
        """Whether every id that the tokenizer has lies within the model's vocabulary."""
        return max(self.tokenizer.get_vocab().values(), default=0) < self.vocab_size

    @cached_property
    def _beginning(self) -> list[int]:
        """What the tokenizer puts before a text (BOS). What it puts after one (EOS) would end the prompt: left out."""
        alone, whole = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        places = range(len(whole) - len(alone) + 1)
        return whole[: next((at for at in places if whole[at : at + len(alone)] == alone), 0)]

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, dict(self.data.chat_template_kwargs))

    def _text(self, number: int, prompt: Any, tools: Any) -> PromptText:
        """A text as it stands; chat messages through the tokenizer's template."""
        where = f"{self.where}: row {number}"
        if isinstance(prompt, str):
            if tools is not None:
                raise DataError(f"{where}: tools are for chat messages, and its prompt is a text; unset data.tools_key")
            text = prompt
        else:
            text = self._template.render(prompt, tools, where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: the prompt is no valid Unicode text: {error}") from error
        return PromptText(number, text, is_plain=isinstance(prompt, str))

    def _tokenise(self, texts: list[PromptText]) -> list[list[int]]:
        """In the order of the texts; many at once, over which a fast tokenizer spreads its threads.

        A text that brings the tokenizer's beginning, since somebody's template wrote it, does not get it twice.
        """
        if not texts:
            return []
        encoded = self.tokenizer([text.text for text in texts], add_special_tokens=False)["input_ids"]
        begin = self._beginning
        return [
            begin + ids if text.is_plain and ids[: len(begin)] != begin else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _check_source(self, number: int, source: Any) -> None:
        if self.sources and source not in self.sources:
            raise DataError(
                f"{self.where}: row {number} has {self.data.source_key}={source!r}, for which reward.sources has no"
                f" reward; it has {', '.join(self.sources)}"
            )

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
        missing = next(key for key in (self.data.prompt_key, self.data.answer_key) if look_up(row, key) is None)
        field_of = "data.prompt_key" if missing == self.data.prompt_key else "data.answer_key"
        if missing in row:
            return DataError(f"{self.where}: row {number} has nothing (null) in its field {missing!r} ({field_of})")
        return DataError(
            f"{self.where}: row {number} has no field {missing!r} ({field_of}); it has {', '.join(sorted(row))}"
        )
