"""Chat messages made into the text of a prompt by the tokenizer's own template."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from mppo.errors import ConfigError, DataError


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer, with `data.chat_template_kwargs` for its own variables (`enable_thinking`)."""

    tokenizer: Any
    variables: dict[str, Any]

    def render(self, messages: Any, tools: Any, where: str) -> str:
        """The conversation, with the opening of an answer; one that ends with the assistant's words is continued.

        Raises DataError, which names the row by `where`, for what is no conversation and for what the template refuses
        or would leave out, and ConfigError for a variable that it does not read.
        """
        if not self._source:
            raise DataError(f"{where}: the prompt is a list of chat messages, but the tokenizer has no chat template")
        self._check_variables()
        conversation = _conversation(messages, where)
        continues = conversation[-1]["role"] == "assistant"
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                tools=self._tools(tools, where),
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self.variables,
            )
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, TemplateError) as error:
            raise DataError(f"{where}: the chat template does not take the prompt: {error}") from error

    @cached_property
    def _source(self) -> str:
        """All of it; a tokenizer may have several templates by name."""
        template = self.tokenizer.chat_template or ""
        return template if isinstance(template, str) else "".join(template.values())

    def _check_variables(self) -> None:
        for name in self.variables:
            if name not in self._source:
                raise ConfigError(
                    f"data.chat_template_kwargs.{name} has no effect: the tokenizer's chat template does not read it"
                )

    def _tools(self, given: Any, where: str) -> list[dict[str, Any]] | None:
        """A list of JSON schemas, or that as a text."""
        if given is None:
            return None
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise DataError(f"{where}: its tools are a text that is no JSON: {error}") from error
        if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
            raise DataError(f"{where}: its tools are no list of JSON schemas")
        if given and "tools" not in self._source:
            raise DataError(f"{where}: it has tools, but the tokenizer's chat template does not read any")
        return given or None


def _conversation(messages: Any, where: str) -> list[dict[str, Any]]:
    """Messages whose contents are texts. Raises DataError for anything else."""
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: the prompt is a {type(messages).__name__}; it must be a text, or a list of at least one chat"
            " message {role, content}"
        )
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where}: it is no chat message {{role, content}}")
    given = {name: value for name, value in message.items() if value is not None}
    content = given.get("content")
    if isinstance(content, list):
        given["content"] = "".join(_text_of(part, where) for part in content)
    elif not isinstance(content, str) and not given.get("tool_calls"):
        raise DataError(f"{where}: its content is {content!r:.80}; it must be a text")
    return given


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where}: its content has a part that is no text ({part!r:.80}); mppo trains on text alone")
    return part["text"]
