"""Where Hugging Face tensors are read from: a folder of safetensors, or a seeded random initialisation."""

import json
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from mppo.errors import ModelError
from mppo.weights.fused import on_disk


class TensorSource(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) `[start, stop)` of a tensor."""
        ...


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""What weights may be stored as, in the words of safetensors."""
LFS_POINTER = b"version https://git-lfs"


class SafetensorsFolder:
    """The weights of a Hugging Face folder, in the files that transformers reads; only the slices asked for are read.

    That is `model.safetensors`, or else what `model.safetensors.index.json` names; other files are left alone.
    """

    def __init__(self, folder: str | Path):
        """Raises ModelError for weights that are missing, not whole, or in another form."""
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        for file in _weight_files(self.folder):
            handle = _opened(file)
            for name in handle.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in self._open:
                    raise ModelError(f"{self.folder}: two files hold {name}, {file.name} the second; remove one")
                self._open[name] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def names(self) -> list[str]:
        return list(self._open)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._view(name).get_shape())

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        view = self._view(name)
        extent = view.get_shape()[dim]
        if stop > extent:
            raise ModelError(f"{self.folder}: {name} has {extent} entries in dim {dim}, config.json asks for {stop}")
        return view[start:stop] if dim == 0 else view[:, start:stop]

    def _view(self, name: str):
        if name not in self._open:
            raise ModelError(f"{self.folder}: tensor {name} is missing from the safetensors files")
        view = self._open[name].get_slice(name)
        if view.get_dtype() not in FLOATS:
            raise ModelError(
                f"{self.folder}: {name} is stored as {view.get_dtype()}; quantized weights are not read: give the"
                " folder that they were made of, or a copy in bfloat16"
            )
        return view


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder}: it has neither {SINGLE} nor {INDEX}{_other_form(folder)}")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / INDEX} cannot be read: {type(error).__name__}: {error}") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder}: {INDEX} names {missing[0]}, which is not there; {len(missing)} files are missing")
    return [folder / name for name in names]


def _other_form(folder: Path) -> str:
    """What there is instead, and what to do with it."""
    if (folder / "adapter_config.json").is_file():
        return "; it is an adapter (LoRA): merge it into its model and save that"
    if any(folder.glob("*.gguf")):
        return "; GGUF files are not read: give the folder they were made of"
    if any(folder.glob("pytorch_model*.bin")):
        return "; convert its pytorch_model files with transformers: from_pretrained(...).save_pretrained(...)"
    return ""


def _opened(file: Path) -> Any:
    with file.open("rb") as content:
        if content.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ModelError(f"{file} is a pointer of Git LFS and no weights; run `git lfs pull` in its repository")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file} is no whole safetensors file: {error}; copy it again") from error


class RandomInitialisation:
    """A new model: every tensor drawn from its own name and the seed, so it is the same under every layout.

    Embedding and output layer are normal with deviation `initializer_range`, other matrices with 0.7 / sqrt(inputs);
    norms are one, biases zero.
    """

    def __init__(self, hf_config: Any, seed: int):
        self.seed, self.initializer_range = seed, hf_config.initializer_range
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        self.shapes = {name: parameter.shape for name, parameter in on_disk(model.named_parameters()).items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shapes[name])

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            whole = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
            of_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
            std = self.initializer_range if of_vocabulary else 0.7 / shape[1] ** 0.5
            whole = torch.randn(shape, generator=generator) * std
        return whole.narrow(dim, start, stop - start)
