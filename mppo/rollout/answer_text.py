"""The text of an answer, as a reward function sees it and as it is written down."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mppo.batch.trajectory import Status, Trajectory


@dataclass(frozen=True)
class AnswerText:
    """Makes text of tokens as they were written: only the token that ended the answer is left out."""

    tokenizer: Any
    end_tokens: Collection[int]
    """Ids that end an answer."""
    skip_special_tokens: bool = False
    """Leave all other special tokens out too."""

    def of_actions(self, trajectory: Trajectory) -> str:
        """Of what the policy wrote, without the prompt and the output of tools."""
        return self._text(trajectory.action_ids, trajectory)

    def after(self, start: int, trajectory: Trajectory) -> str:
        """Of all tokens from the `start`th on."""
        return self._text(trajectory.token_ids[start:].tolist(), trajectory)

    def _text(self, token_ids: list[int], trajectory: Trajectory) -> str:
        if trajectory.status == Status.FINISHED and token_ids and token_ids[-1] in self.end_tokens:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )
