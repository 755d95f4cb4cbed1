"""What a run shows: a progress display, one line a step in a log, JSONL, TensorBoard, samples and a learning curve."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from mppo.batch.trajectory import Answer
from mppo.rollout.prompts import Prompt
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
    def of(cls, answer: Answer, prompt: Prompt, tokenizer: Any) -> "SampleLine":
        trajectory = answer.trajectory
        return cls(
            prompt=prompt.text,
            response=tokenizer.decode(trajectory.token_ids[len(prompt.token_ids) :]),
            ground_truth=prompt.ground_truth,
            reward=answer.judgement.total_reward,
            status=trajectory.status,
            weight_version=max((span.weight_version for span in trajectory.spans), default=0),
        )


class SilentReporter:
    """What the ranks other than 0 report."""

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

    def finish(self, accuracies: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class Reporter(SilentReporter):
    """Writes into `out_dir`: train.log, metrics.jsonl, tensorboard/, samples/step_*.jsonl, learning_curve.png."""

    def __init__(self, out_dir: str, total_steps: int):
        self.out = Path(out_dir)
        (self.out / "samples").mkdir(parents=True, exist_ok=True)
        self.total_steps = total_steps
        self.pending: list[SampleLine] = []

    def start(self, first_step: int) -> None:
        """Open the files; what metrics.jsonl holds of steps after `first_step` is moved to metrics.superseded.jsonl."""
        self._set_aside(first_step)
        self.log = open(self.out / "train.log", "a", buffering=1)  # noqa: SIM115  (closed in finish)
        self.jsonl = open(self.out / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.tensorboard = SummaryWriter(str(self.out / "tensorboard"), purge_step=first_step + 1, flush_secs=10)
        self.console = Console()
        self.progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self.console
        )
        self.task = self.progress.add_task("training", total=self.total_steps, completed=first_step)
        self.progress.start()

    def _set_aside(self, first_step: int) -> None:
        path = self.out / "metrics.jsonl"
        if not path.is_file():
            return
        kept: list[str] = []
        superseded: list[str] = []
        for line in path.read_text().splitlines(keepends=True):
            goes_on = first_step and line.endswith("\n") and json.loads(line)["step"] <= first_step
            (kept if goes_on else superseded).append(line)
        path.write_text("".join(kept))
        with open(self.out / "metrics.superseded.jsonl", "a") as file:
            file.writelines(superseded)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._record(step, metrics)
        parts = [f"{title} {form.format(metrics[name])}" for title, name, form in SHOWN if name in metrics]
        line = f"step {step:4d}  " + "  ".join(parts)
        self.log.write(line + "\n")
        self.console.print(line, highlight=False, soft_wrap=True)
        self.progress.update(self.task, completed=step)
        self._write_samples(f"step_{step:06d}")

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self._record(step, metrics)
        line = f"held-out after step {step}: accuracy {metrics['val/accuracy']:.3f}  reward {metrics['val/reward']:.3f}"
        self.log.write(line + "\n")
        self.console.print(line, highlight=False)

    def samples(self, lines: list[SampleLine]) -> None:
        self.pending.extend(lines)

    def note(self, text: str) -> None:
        """A line for the log and the terminal."""
        self.log.write(text + "\n")
        self.console.print(text, style="yellow", highlight=False, soft_wrap=True)

    def finish(self, accuracies: dict[str, float]) -> None:
        """Close the files, draw the curve, and print the held-out accuracy as the last line."""
        self.close()
        curve = draw_curve(self.out / "metrics.jsonl", self.out / "learning_curve.png")
        self.console.print(f"metrics, samples and {curve.name} are in {self.out}", highlight=False)
        if accuracies:
            shown = " -> ".join(f"{value:.2f}" for value in accuracies.values())
            self.console.print(f"held-out greedy accuracy: {shown}", highlight=False)

    def close(self) -> None:
        self._write_samples("pending")
        self.progress.stop()
        for file in (self.log, self.jsonl, self.tensorboard):
            file.close()

    def _write_samples(self, name: str) -> None:
        if self.pending:
            path = self.out / "samples" / f"{name}.jsonl"
            path.write_text("".join(json.dumps(asdict(s), default=str) + "\n" for s in self.pending))
            self.pending = []

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self.jsonl.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, step)
