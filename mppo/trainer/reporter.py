"""What a run shows: a progress display, one line a step in a log, JSONL, TensorBoard, samples and a learning curve."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from mppo.batch.trajectory import Answer
from mppo.rollout.answer_text import AnswerText
from mppo.rollout.prompts import Prompt
from mppo.trainer import run_folder
from mppo.trainer.curve import draw_curve

SHOWN = (
    ("token loss", "sft/token_loss", "{:.4f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.3f}"),
    ("no signal", "reward/groups_without_signal", "{:.2f}"),
    ("ppo kl", "actor/ppo_kl", "{:.1e}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("entropy", "actor/entropy", "{:.2f}"),
    ("expl.var", "critic/explained_variance", "{:.2f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("s/step", "time/train_step", "{:.1f}"),
)
"""Title, metric and format of the numbers on the progress line; those a run does not have are left out."""


@dataclass(frozen=True)
class SampleLine:
    """One generation, as it is written to disk."""

    prompt: str
    response: str
    ground_truth: Any
    reward: float
    status: str
    weight_version: int
    """Of the newest weights that wrote it."""

    @classmethod
    def of(cls, answer: Answer, prompt: Prompt, text: AnswerText) -> "SampleLine":
        trajectory = answer.trajectory
        return cls(
            prompt=prompt.text,
            response=text.after(len(prompt.token_ids), trajectory),
            ground_truth=prompt.ground_truth,
            reward=answer.judgement.total_reward,
            status=trajectory.status,
            weight_version=max((span.weight_version for span in trajectory.spans), default=0),
        )


class SilentReporter:
    """What the ranks other than 0 report."""

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint remembers of the files, so that a run that goes on from it has what came before."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass

    def start(self, first_step: int) -> None:
        pass

    def step(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def samples(self, lines: list[SampleLine]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, accuracies: dict[int, float]) -> None:
        pass

    def close(self) -> None:
        pass


class Reporter(SilentReporter):
    """Writes into `out_dir`: train.log, metrics.jsonl, tensorboard/, samples/step_*.jsonl, learning_curve.png."""

    def __init__(self, out_dir: str, total_steps: int, accuracy: str = "held-out greedy accuracy"):
        self.out, self.total_steps, self.accuracy = Path(out_dir), total_steps, accuracy
        self.console = Console()
        self.log: TextIO | None = None
        self.pending: list[SampleLine] = []
        self._kept: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        return run_folder.lengths(self.out)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._kept = state

    def start(self, first_step: int) -> None:
        """Open the files; what there is of steps after `first_step` is moved to `superseded_N`."""
        run_folder.set_aside(self.out, first_step, self._kept if first_step else {})
        (self.out / "samples").mkdir(parents=True, exist_ok=True)
        self.log = open(self.out / "train.log", "a", buffering=1)  # noqa: SIM115  (closed in finish)
        self.jsonl = open(self.out / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.tensorboard = SummaryWriter(str(self.out / "tensorboard"), flush_secs=10)
        for row in run_folder.rows_of(self.out):
            self._draw(row.pop("step"), row)
        self.progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self.console
        )
        self.task = self.progress.add_task("training", total=self.total_steps, completed=first_step)
        self.progress.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._record(step, metrics)
        parts = [f"{title} {form.format(metrics[name])}" for title, name, form in SHOWN if name in metrics]
        line = f"step {step:4d}  " + "  ".join(parts)
        self._log(line)
        self.console.print(line, highlight=False, soft_wrap=True)
        self.progress.update(self.task, completed=step)
        self._write_samples(f"step_{step:06d}")

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self._record(step, metrics)
        line = f"held-out after step {step}: accuracy {metrics['val/accuracy']:.3f}  reward {metrics['val/reward']:.3f}"
        line += "".join(f"  {name[4:]} {value:.3f}" for name, value in metrics.items() if name.startswith("val/pass@"))
        self._log(line)
        self.console.print(line, highlight=False)

    def samples(self, lines: list[SampleLine]) -> None:
        self.pending.extend(lines)

    def note(self, text: str) -> None:
        """A line for the log and the terminal."""
        self._log(text)
        self.console.print(text, style="yellow", highlight=False, soft_wrap=True)

    def finish(self, accuracies: dict[int, float]) -> None:
        """Close the files, draw the curve, and print the first and the last held-out accuracy as the last line."""
        self.close()
        self._picture()
        self.console.print(f"metrics, samples and the learning curve are in {self.out}", highlight=False)
        if accuracies:
            steps = sorted({min(accuracies), max(accuracies)})
            shown = " -> ".join(f"{accuracies[step]:.2f}" for step in steps)
            self.console.print(f"{self.accuracy}: {shown}", highlight=False)

    def _picture(self) -> None:
        """Of the curve; what cannot be drawn costs nobody a run."""
        try:
            draw_curve(self.out / "metrics.jsonl", self.out / "learning_curve.png")
        except Exception as error:
            self.console.print(f"the learning curve cannot be drawn: {type(error).__name__}: {error}", style="yellow")

    def close(self) -> None:
        """Close the files, if they are open."""
        if self.log is None or self.log.closed:
            return
        self._write_samples("pending")
        self.progress.stop()
        for file in (self.log, self.jsonl, self.tensorboard):
            file.close()

    def _log(self, line: str) -> None:
        assert self.log is not None
        self.log.write(line + "\n")

    def _write_samples(self, name: str) -> None:
        if self.pending:
            path = self.out / "samples" / f"{name}.jsonl"
            path.write_text("".join(json.dumps(asdict(s), default=str) + "\n" for s in self.pending))
            self.pending = []

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self.jsonl.write(json.dumps({"step": step, **metrics}) + "\n")
        self._draw(step, metrics)

    def _draw(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, step)
