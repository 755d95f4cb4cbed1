"""The learning curve of a run, from its metrics file."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the backend is chosen)

PANELS = (
    ("reward", ("reward/mean", "val/accuracy")),
    ("cross entropy", ("sft/token_loss",)),
    ("policy", ("actor/ppo_kl", "actor/pg_clipfrac")),
    ("critic", ("critic/explained_variance",)),
    ("entropy", ("actor/entropy",)),
)


def draw_curve(metrics: Path, picture: Path) -> Path:
    """One panel for each group of metrics that the run has (none but zeros: no panel); returns the path of the PNG."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    panels = [(title, names) for title, names in PANELS if any(row.get(n) for row in rows for n in names)]
    if not panels:
        return picture
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.2), squeeze=False)
    for axis, (title, names) in zip(axes[0], panels, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 10 else None)
        axis.set_xlabel("training step")
        axis.set_title(title)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture
