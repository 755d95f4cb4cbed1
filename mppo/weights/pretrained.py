"""Opening a model: its configuration, tokenizer, parameter table and tensors."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from mppo.config import ModelSource
from mppo.errors import ConfigError, ModelError
from mppo.megatron.model_config import ModelConfig
from mppo.weights.architectures import Architecture, architecture_of
from mppo.weights.presets import PRESETS
from mppo.weights.sources import RandomInitialisation, SafetensorsFolder, TensorSource


@dataclass(frozen=True)
class PretrainedModel:
    """What a Hugging Face folder (or a preset) says, opened but not loaded."""

    hf_config: Any
    tokenizer: Any
    architecture: Architecture
    config: ModelConfig
    source: TensorSource
    dtype: torch.dtype


def open_model(model: ModelSource, seed: int) -> PretrainedModel:
    """Open `model.path` or `model.preset`. Raises ModelError for a folder that is missing or not supported.

    Raises ConfigError for a setting that the model would not read.
    """
    _check_given(model)
    if model.preset is not None:
        hf_config, tokenizer = PRESETS.get(model.preset).fn(dict(model.preset_options))
        source: TensorSource = RandomInitialisation(hf_config, seed)
    else:
        hf_config = read_hf_config(model.path, "model.path")
        source = SafetensorsFolder(model.path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path={model.path}: its tokenizer cannot be read: {error}") from error
    architecture = architecture_of(hf_config)
    config = architecture.model_config(hf_config, model.make_vocab_size_divisible_by)
    if model.moe_aux_loss_coeff and config.num_experts is None:
        raise ConfigError(
            f"model.moe_aux_loss_coeff={model.moe_aux_loss_coeff} would have no effect: the model is dense; unset it"
        )
    return PretrainedModel(
        hf_config=hf_config,
        tokenizer=tokenizer,
        architecture=architecture,
        config=replace(config, moe_aux_loss_coeff=model.moe_aux_loss_coeff),
        source=source,
        dtype=getattr(torch, model.dtype),
    )


def read_model_config(model: ModelSource) -> ModelConfig:
    """The numbers of `model.path` or `model.preset` alone. Raises as `open_model` does."""
    _check_given(model)
    if model.preset is not None:
        hf_config, _ = PRESETS.get(model.preset).fn(dict(model.preset_options))
    else:
        hf_config = read_hf_config(model.path, "model.path")
    return architecture_of(hf_config).model_config(hf_config, model.make_vocab_size_divisible_by)


def _check_given(model: ModelSource) -> None:
    if model.path is None and model.preset is None:
        raise ConfigError("give model.path (a Hugging Face model folder) or model.preset")


def read_hf_config(path: str, field: str) -> Any:
    """config.json of a local folder; never a hub. Raises ModelError that names the configuration field."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{field}={path}: no such folder; give the path of a Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{field}={path}: no config.json in this folder; is it a Hugging Face model folder?")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{field}={path}: config.json cannot be read: {error}") from error
