"""The files of an exported model folder besides its weights, for the transformers of today and of years before."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mppo.weights.pretrained import PretrainedModel

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "additional_chat_templates",
)
"""Names of what tokenizers consist of."""
TOKENIZER_CONFIG = "tokenizer_config.json"
OLD_CLASS = "PreTrainedTokenizerFast"
"""What a tokenizer is called that is all in tokenizer.json; transformers 5 writes `TokenizersBackend`, reads both."""


def write_folder_files(model: PretrainedModel, folder: Path) -> None:
    """config.json, the tokenizer and generation_config.json; what did not change is as it was, byte for byte."""
    config = exported_config(model.hf_config, _source_config(model.folder), model.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if model.folder is None:
        model.tokenizer.save_pretrained(folder)
    else:
        _copy(_files(model.folder, (*TOKENIZER, "generation_config.json")), folder)
    _spell_for_old_versions(folder / TOKENIZER_CONFIG)


def exported_config(hf_config: Any, source: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`source`, what the folder said, with the dtype of these weights; what versions spell differently in both ways.

    Up to version 4 transformers reads `torch_dtype`, `rope_theta`, `rope_scaling` and `num_experts`, from 5 on `dtype`,
    `rope_parameters` and `num_local_experts`.
    """
    name, rope = str(dtype).removeprefix("torch."), dict(hf_config.rope_parameters)
    experts = getattr(hf_config, "num_experts", None)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {
        **(source or hf_config.to_dict()),
        **({} if experts is None else {"num_experts": experts, "num_local_experts": experts}),
        "architectures": hf_config.architectures or [f"{type(hf_config).__name__.removesuffix('Config')}ForCausalLM"],
        "model_type": hf_config.model_type,
        "tie_word_embeddings": hf_config.tie_word_embeddings,
        "dtype": name,
        "torch_dtype": name,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if is_scaled else None,
        "rope_parameters": rope,
    }


def _source_config(folder: Path | None) -> dict[str, Any]:
    return {} if folder is None else json.loads((folder / "config.json").read_text())


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def _copy(paths: Iterator[Path], folder: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


def _spell_for_old_versions(path: Path) -> None:
    """Older versions know neither the class that version 5 names nor a list of `extra_special_tokens`."""
    if not path.is_file():
        return
    config = json.loads(path.read_text())
    changed = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        changed["tokenizer_class"] = OLD_CLASS
    if isinstance(config.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    if changed != config:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
