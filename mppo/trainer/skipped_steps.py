"""Optimizer steps that are left out because their loss or gradient is not finite."""

from collections.abc import Callable
from typing import Any, TypeVar

from mppo.errors import TrainingError

T = TypeVar("T")


class SkippedSteps:
    """Counts them, and ends the run at a bound; `stop` ends it at the first."""

    def __init__(self, on_non_finite: str, bound: int):
        self.on_non_finite, self.bound = on_non_finite, bound
        self.in_a_row = 0
        """Of one role or the other, since the last step that was made."""
        self.total = 0

    def attempt(self, step: Callable[[], T]) -> T | None:
        """What the step returns, or None where it is left out. Raises TrainingError where the run is to end."""
        try:
            made = step()
        except TrainingError as error:
            self._leave_out(error)
            return None
        self.in_a_row = 0
        return made

    def _leave_out(self, error: TrainingError) -> None:
        if self.on_non_finite == "stop":
            error.add_note("trainer.on_non_finite=skip leaves such steps out")
            raise error
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row > self.bound:
            error.add_note(
                f"it is the {self.in_a_row}th step in a row, more than trainer.max_skipped_steps={self.bound}; lower"
                " optim.lr, or look for losses and rewards without bound"
            )
            raise error

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.total = state["in_a_row"], state["total"]
