"""Groups of answers, and what is saved of them."""

from dataclasses import asdict, dataclass
from typing import Any

from mppo.batch.trajectory import Answer, Judgement, Purpose, Span, Status, Trajectory, TrajectoryId, Turn
from mppo.rollout.prompt_reader import Prompt


@dataclass(frozen=True)
class Group:
    """All answers to one prompt of the run, judged: samples, and greedy baselines where the estimator wants them."""

    number: int
    """Of the prompt in the run."""
    prompt: Prompt
    answers: tuple[Answer, ...]

    @property
    def samples(self) -> list[Answer]:
        """Those that may be trained on."""
        return [answer for answer in self.answers if answer.trains]


def group_state(group: Group) -> dict[str, Any]:
    """Numbers, texts and tensors in dicts and lists; the prompt is left out, for its number tells which it is."""
    return {"number": group.number, "answers": [_plain(asdict(answer)) for answer in group.answers]}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    trajectory = state["trajectory"]
    texts = {name: str(trajectory[name]) for name in ("status", "purpose")}
    return state | {"trajectory": trajectory | texts}


def group_of(state: dict[str, Any], prompt: Prompt) -> Group:
    """The group that `group_state` was given."""
    return Group(state["number"], prompt, tuple(_answer_of(answer) for answer in state["answers"]))


def _answer_of(state: dict[str, Any]) -> Answer:
    trajectory, uid = state["trajectory"], TrajectoryId(**state["trajectory"]["uid"])
    nested = {
        "uid": uid,
        "spans": tuple(Span(**span) for span in trajectory["spans"]),
        "turns": tuple(Turn(**turn) for turn in trajectory["turns"]),
        "status": Status(trajectory["status"]),
        "purpose": Purpose(trajectory["purpose"]),
    }
    return Answer(Trajectory(**(trajectory | nested)), Judgement(**(state["judgement"] | {"uid": uid})))
