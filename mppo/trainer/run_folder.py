"""The folder of a run: what it is told at the start, and what of an earlier run does not stay among the new."""

import json
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

STREAMS = ("metrics.jsonl", "train.log")
"""Files that grow with the run, line by line."""


def describe(folder: Path, config: dict[str, Any]) -> None:
    """Write the whole configuration, `config.yaml`, and the versions of all packages, `packages.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    versions = sorted({f"{package.metadata['Name']}=={package.version}" for package in distributions()})
    (folder / "packages.txt").write_text("\n".join(versions) + "\n")


def lengths(folder: Path) -> dict[str, int]:
    """Bytes of each stream, for a checkpoint to remember."""
    return {name: (folder / name).stat().st_size for name in STREAMS if (folder / name).is_file()}


def set_aside(folder: Path, first_step: int, kept: Mapping[str, int]) -> None:
    """Move what an earlier run left after the step `first_step` that a run goes on from into `superseded_N`.

    `kept[name]` bytes of a stream stay. Samples and exported models of later steps go, and TensorBoard's files, which
    follow from the metrics. A run that goes on from no step starts in a folder without any of that, nor checkpoints.
    """
    target = _new_folder(folder)
    for name in STREAMS:
        _cut(folder / name, kept.get(name, 0), target)
    for path in _outdated(folder, first_step):
        _move(path, target / path.relative_to(folder))


def _new_folder(folder: Path) -> Path:
    """Of the first free number; made when something is moved."""
    number = 1
    while (folder / f"superseded_{number}").exists():
        number += 1
    return folder / f"superseded_{number}"


def _cut(path: Path, size: int, target: Path) -> None:
    if not path.is_file() or path.stat().st_size <= size:
        return
    content = path.read_bytes()
    target.mkdir(parents=True, exist_ok=True)
    (target / path.name).write_bytes(content[size:])
    path.write_bytes(content[:size])


def _outdated(folder: Path, first_step: int) -> Iterator[Path]:
    for path in sorted(folder.glob("samples/*.jsonl")) + sorted(folder.glob("hf_step_*")):
        number = path.stem.rpartition("_")[2]
        if not number.isdigit() or int(number) > first_step:
            yield path
    yield folder / "tensorboard"
    if not first_step:
        yield from (folder / "checkpoints", folder / "hf", folder / "learning_curve.png")


def _move(path: Path, target: Path) -> None:
    if path.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics that are there; a line that a crash cut off is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
