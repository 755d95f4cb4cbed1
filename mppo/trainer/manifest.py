"""`manifest.json`, the last file of a checkpoint to be written: what is in it, and of which run it is."""

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mppo.config import Config
from mppo.errors import CheckpointError, ModelError
from mppo.weights.pretrained import PretrainedModel

FORMAT = 1
"""Goes up when a checkpoint can no longer be read by older versions of mppo."""
MANIFEST = "manifest.json"
NOT_OF_THE_MODEL = ("make_vocab_size_divisible_by", "moe_aux_loss_coeff")
"""Numbers of ModelConfig that are chosen for a run."""


@dataclass(frozen=True)
class ModelIdentity:
    """Which model's weights these are, whoever trained them."""

    architecture: str
    """As Hugging Face names it."""
    numbers: dict[str, Any]
    """Layers, sizes, rotary base and so on."""
    hash: str
    """Of both; models whose tensors mean the same have the same."""

    @classmethod
    def of(cls, model: PretrainedModel) -> "ModelIdentity":
        numbers = {name: value for name, value in asdict(model.config).items() if name not in NOT_OF_THE_MODEL}
        text = json.dumps([model.architecture.hf_name, numbers], sort_keys=True)
        return cls(model.architecture.hf_name, numbers, hashlib.sha256(text.encode()).hexdigest()[:16])

    def check(self, now: "ModelIdentity", role: str, source: Path) -> None:
        """Raise ModelError, which names what differs, unless `now` is the same model."""
        if self.hash == now.hash:
            return
        before, after = {"architecture": self.architecture, **self.numbers}, {"architecture": now.architecture}
        after |= now.numbers
        names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        said = "; ".join(f"{name}: {before.get(name)} -> {after.get(name)}" for name in sorted(names))
        raise ModelError(
            f"{source} was saved of another {role} model ({said}); give the model it was saved of, or another"
            " trainer.out_dir"
        )


@dataclass(frozen=True)
class RunDescription:
    """The run that a checkpoint is of."""

    config: dict[str, Any]
    """All of it, as it would come back from JSON."""
    models: dict[str, ModelIdentity]
    """Of the roles that are trained."""
    layout: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(cls, config: Config, models: dict[str, PretrainedModel], world_size: int) -> "RunDescription":
        return cls(
            config=json.loads(json.dumps(asdict(config))),
            models={role: ModelIdentity.of(model) for role, model in models.items()},
            layout={"world_size": world_size, **asdict(config.parallel)},
            versions={
                "python": platform.python_version(),
                **{name: _version(name) for name in ("mppo", "torch", "megatron-core")},
            },
        )


@dataclass(frozen=True)
class Manifest:
    step: int
    """Training steps that are done."""
    weight_version: int
    """Updates of the actor, as the engine counts them."""
    states: list[str]
    """Whose state is saved."""
    run: RunDescription
    rescued: bool = False
    """Each rank wrote what it held by itself, for they could not save together: the layout must stay."""
    score: float | None = None
    """What the validation after its step found; None where there was none."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """In one go: a folder with a manifest is a complete checkpoint."""
        write_durably(folder / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises CheckpointError when it is not there, not readable, or of a newer format."""
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_text())
            if found["format"] > FORMAT:
                raise CheckpointError(
                    f"{path} is of format {found['format']}, this mppo reads up to {FORMAT}; it was saved with mppo"
                    f" {found['run']['versions']['mppo']}, use that or a newer one"
                )
            run = found["run"]
            models = {role: ModelIdentity(**model) for role, model in run["models"].items()}
            return cls(**{**found, "run": RunDescription(**{**run, "models": models})})
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {MANIFEST}: the save was interrupted, or made by an older mppo; write the name of a"
                f" complete checkpoint into {folder.parent / 'latest'}, or start anew with trainer.resume=false"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def is_complete(folder: Path) -> bool:
    """Whether the save came to its end."""
    return (folder / MANIFEST).is_file()


def written_at(folder: Path) -> float:
    """When a complete checkpoint was, in seconds; after a roll-back the newest need not be that of the last step."""
    return (folder / MANIFEST).stat().st_mtime


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file in one go: whoever reads it, after a crash too, finds the old content or the new."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
