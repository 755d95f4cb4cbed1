"""`mppo mismatch`: answers by the servers, scored by both sides, and a table of why they disagree."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mppo.config import Config
from mppo.errors import ConfigError, alike_on_every_rank
from mppo.mismatch.diagnosis import diagnose
from mppo.mismatch.evidence import Evidence
from mppo.mismatch.finding import Finding
from mppo.mismatch.gathering import Asking
from mppo.mismatch.opening import Opened, open_sides
from mppo.trainer.assemble import sampling_of


def mismatch(config: Config, run: Path | None, prompts: int, *, refit: bool, json_file: Path | None) -> int:
    """Examine a configuration, or a run by its folder; returns 0 where both sides agree, 1 where something was found.

    Without `refit` the servers keep what they hold. Collective; the first rank prints. Raises MppoError for what
    `mppo train` would refuse, and EngineError where a server cannot be asked.
    """
    with alike_on_every_rank():
        if prompts < 1:
            raise ConfigError(f"--prompts is {prompts}; it must be at least 1")
        if not refit and not config.rollout.sglang.urls:
            raise ConfigError(
                "--no-refit: a server that is launched has no weights; give rollout.sglang.urls, or leave it out"
            )
    opened = open_sides(config, run)
    sides = opened.sides
    try:
        if refit:
            sides.refit(opened.version)
        asking = Asking(
            sampling_of(config, config.rollout), seed=config.trainer.seed, timeout_s=config.rollout.timeout_s
        )
        evidence, hypotheses = sides.gather(opened.stream.draw(prompts), asking, opened.version)
        findings = diagnose(evidence, hypotheses)
    finally:
        sides.loop.run(sides.engine.close())
        sides.loop.close()
    if sides.trainer.topology.rank == 0:
        _print(evidence, findings, opened, Console())
        if json_file is not None:
            _write(json_file, as_json(evidence, findings, opened))
    return 1 if findings else 0


def as_json(evidence: Evidence, findings: list[Finding], opened: Opened) -> dict[str, Any]:
    """What was found, as numbers and texts."""
    return {
        "findings": [asdict(finding) | {"remedy": finding.remedy} for finding in findings],
        "weights": opened.weights,
        "version": evidence.version,
        "servers": [server.url for server in evidence.servers],
        "trajectories": len(evidence.trajectories),
        "tokens": sum(len(scored.token_ids) for scored in evidence.trajectories),
        "largest_differences": differences(evidence),
        "tolerance": evidence.tolerance,
    }


def differences(evidence: Evidence) -> dict[str, float]:
    """The largest ones between scorings of the same tokens, nats."""
    pairs = {
        "engine reading anew, trainer": [(s.prefill, s.reference) for s in evidence.trajectories],
        "engine with cached prefixes, without": [(s.salted, s.prefill) for s in evidence.trajectories],
    }
    if all(scored.temperature == evidence.temperature for scored in evidence.trajectories):
        pairs["engine writing, training"] = [
            (s.reported, torch.where(s.action_mask, s.trained, torch.nan)) for s in evidence.trajectories
        ]
    return {name: max(float(torch.nan_to_num((a - b).abs()).max()) for a, b in found) for name, found in pairs.items()}


def _print(evidence: Evidence, findings: list[Finding], opened: Opened, console: Console) -> None:
    tokens = sum(len(scored.token_ids) for scored in evidence.trajectories)
    console.print(
        f"{opened.weights}, version {evidence.version}: {tokens} tokens of {len(evidence.trajectories)} answers by"
        f" {', '.join(server.url for server in evidence.servers)}, scored by both sides",
        highlight=False,
    )
    for name, largest in differences(evidence).items():
        console.print(f"  {name}: at most {largest:.2g} nats apart", highlight=False)
    if not findings:
        console.print(f"[green]they agree[/green] (within {evidence.tolerance:g} nats)")
        return
    table = Table(title="why trainer and engine disagree", show_lines=True)
    for title in ("cause", "where", "shown by", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(_named(finding), str(finding.place), finding.shown, finding.remedy)
    console.print(table, markup=False)


def _named(finding: Finding) -> str:
    """With what would look the same."""
    names = " or ".join([finding.cause, *finding.or_else])
    return names if finding.proved or finding.or_else else f"{names} (likely)"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2))
    except OSError as error:
        raise ConfigError(f"--json {path}: {error}") from error
