"""How far a run has come."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """A state of the run, the same on every rank."""

    step: int = 0
    """Training steps that are done."""
    weight_version: int = 0
    """Updates of the actor that are done: training steps but those of a critic's warm-up."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """On held-out prompts, by the step after which they were answered."""

    @property
    def accuracy(self) -> float | None:
        """After the last step; None where it was not validated."""
        return self.accuracies.get(self.step)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.weight_version = state["step"], state["weight_version"]
        self.accuracies = {int(step): found for step, found in state["accuracies"].items()}  # JSON's keys are texts
