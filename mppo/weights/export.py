"""Writing a Hugging Face model folder from Megatron chunks of any layout, several ranks writing at a time."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from mppo.errors import ModelError
from mppo.megatron.collectives import fail_together
from mppo.weights.folder_files import write_folder_files
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel
from mppo.weights.transfer_plan import Layout, plan, whole_tensors
from mppo.weights.transports.point_to_point import PointToPoint

LARGEST_FILE = 5_000_000_000
"""Bytes, as Hugging Face's own writers cut a model; what a rank holds of it in host memory while it writes."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFile:
    name: str
    tensors: tuple[str, ...]
    writer: int
    """The rank that writes it."""


def export_hf(
    weights: LiveWeights,
    model: PretrainedModel,
    folder: str | Path,
    *,
    largest_file: int = LARGEST_FILE,
    transport: PointToPoint | None = None,
) -> None:
    """Write safetensors files of at most `largest_file` bytes (or one tensor), configuration and tokenizer. Collective.

    Each file has one writer, and a rank holds one file at a time. All goes into `folder` + `.incomplete`, which takes
    the place of `folder` once everything is written; what a crash leaves has that name. Raises ModelError, on every
    rank, when something cannot be written or the ranks do not share a file system.
    """
    folder = Path(folder)
    made = folder.with_name(folder.name + ".incomplete")
    files = weight_files(weights.layout, largest_file)
    with fail_together(), _writing(made):
        if weights.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
    with fail_together():
        if not made.is_dir():
            raise ModelError(f"{made} is not there on rank {weights.rank}; do all machines share this file system?")
    wave = dist.get_world_size()
    for start in range(0, len(files), wave):
        _write_wave(files[start : start + wave], weights, made, transport or PointToPoint())
    with fail_together(), _writing(made):
        if weights.rank == 0:
            _write_rest(files, weights.layout, model, made)
            _replace(folder, made)


def weight_files(layout: Layout, largest_file: int) -> list[WeightFile]:
    """The tensors in order, cut into files; of every `len(ranks)` files each rank writes one.

    Among ranks that are free a file goes to the one that holds most of it, so that least travels.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in layout.tensors.items():
        if groups[-1] and size + tensor.bytes > largest_file:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.bytes
    held = _held_bytes(layout)
    files: list[WeightFile] = []
    free: set[int] = set()
    for number, names in enumerate(groups, start=1):
        free = free or set(layout.holdings)
        writer = min(free, key=lambda rank: (-sum(held[rank].get(name, 0) for name in names), rank))
        free.remove(writer)
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        files.append(WeightFile(name, tuple(names), writer))
    return files


def _held_bytes(layout: Layout) -> dict[int, dict[str, int]]:
    """Of each tensor, for each rank."""
    found: dict[int, dict[str, int]] = {}
    for rank, holding in layout.holdings.items():
        found[rank] = {}
        for piece in holding.pieces:
            tensor = layout.tensors[piece.hf.name]
            share = tensor.bytes * len(piece.hf) // tensor.shape[piece.hf.dim]
            found[rank][piece.hf.name] = found[rank].get(piece.hf.name, 0) + share
    return found


def _write_wave(files: list[WeightFile], weights: LiveWeights, folder: Path, transport: PointToPoint) -> None:
    """One file a rank at most."""
    target = whole_tensors(weights.layout.tensors, {file.writer: file.tensors for file in files})
    mine = [file for file in files if file.writer == weights.rank]
    whole = {
        name: torch.empty(target.tensors[name].shape, dtype=target.tensors[name].dtype)
        for file in mine
        for name in file.tensors
    }
    transport.run(plan(weights.layout, target), weights, whole)
    with fail_together(), _writing(folder):
        for file in mine:
            save_file(whole, folder / file.name, metadata={"format": "pt"})


def _write_rest(files: list[WeightFile], layout: Layout, model: PretrainedModel, folder: Path) -> None:
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.bytes for tensor in layout.tensors.values())},
            "weight_map": {name: file.name for file in files for name in file.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    write_folder_files(model, folder)


def _replace(folder: Path, made: Path) -> None:
    """Put `made` in the place of `folder`, which stays whole until its successor is."""
    old = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A full disk or a missing permission is the user's to know."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: the model cannot be written: {error}") from error
