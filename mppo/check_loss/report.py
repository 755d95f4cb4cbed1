"""`mppo check-loss`: the conformance kit as a table, and a picture of the loss and its gradient against the ratio."""

from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mppo.algorithm.policy_losses import PolicyLoss, policy_loss
from mppo.algorithm.policy_losses.probe import Sample, with_prepared
from mppo.algorithm.segments import Segments
from mppo.check_loss.examination import Finding, examine, loss_and_gradient
from mppo.errors import ConfigError


def check_loss(name: str, knobs: list[str], out: str | None, console: Console) -> int:
    """Examine the loss of that name or import path; returns 0 when it passes all checks, 1 otherwise.

    Raises ConfigError for an unknown loss, and for a knob that it does not read or that is not `name=value`.
    """
    loss = policy_loss(name, _parsed(knobs))
    findings = examine(loss)
    _print(name, findings, console)
    if findings[0].passed:
        picture = draw(loss, Path(out or f"{name.rpartition(':')[2]}.png"))
        console.print(f"loss and gradient against the ratio: {picture}", highlight=False)
    return 0 if all(finding.passed for finding in findings) else 1


def _parsed(knobs: list[str]) -> dict[str, object]:
    for knob in knobs:
        if "=" not in knob:
            raise ConfigError(f"{knob!r} is not a knob; give name=value, clip_ratio=0.1 for example")
    try:
        return {name: yaml.safe_load(value) for name, _, value in (knob.partition("=") for knob in knobs)}
    except yaml.YAMLError as error:
        raise ConfigError(f"{' '.join(knobs)}: a value cannot be read: {error}") from error


def _print(name: str, findings: list[Finding], console: Console) -> None:
    table = Table(title=f"policy loss {name}")
    for title in ("check", "", "measured"):
        table.add_column(title)
    for finding in findings:
        verdict = "[green]ok[/green]" if finding.passed else "[red]FAILED[/red]"
        table.add_row(finding.check, verdict, finding.detail)
    console.print(table)


def curve(loss: PolicyLoss, advantage: float, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient with respect to the log-prob, `[N]` each, of trajectories of one token each."""
    count = len(ratios)
    old = torch.full_like(ratios, -1.5)
    gradients, losses = torch.zeros_like(ratios), torch.zeros_like(ratios)
    sample = Sample(
        log_probs=old + ratios.log(),
        old_log_probs=old,
        rollout_log_probs=old,
        ref_log_probs=old,
        advantages=torch.full_like(ratios, advantage),
        mask=torch.ones(count, dtype=torch.bool),
        segments=Segments(torch.arange(count), count),
        batch_positions=torch.arange(count),
        prepared={},
        token_weights=torch.ones_like(ratios),
    )
    sample = with_prepared(loss, sample)
    for i in range(count):
        losses[i], gradient = loss_and_gradient(loss, sample.trajectories([i]))
        gradients[i] = gradient
    return losses, gradients


def draw(loss: PolicyLoss, path: Path) -> Path:
    """Two panels, one for a good action and one for a bad; returns where the picture is."""
    from matplotlib.figure import Figure

    ratios = torch.linspace(0.05, 4.0, 160, dtype=torch.double)
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, advantage in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        losses, gradients = curve(loss, advantage, ratios)
        axes.plot(ratios, losses, label="loss")
        axes.plot(ratios, gradients, label="gradient (of the log-prob)")
        axes.axvline(1.0, color="grey", linewidth=0.5)
        axes.set(title=f"{loss.name}, advantage {advantage:+g}", xlabel="ratio of the current policy to the old")
        axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error}") from error
    return path
