"""Opening a model: its configuration, tokenizer, parameter table and tensors."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from mppo.config import CriticConfig, ModelSource
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
    end_tokens: tuple[int, ...]
    """Ids that end an answer: those that generation_config.json, config.json and the tokenizer name."""
    folder: Path | None = None
    """Where it was read from; None for a preset."""


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
        tokenizer = _tokenizer(model.path, "model.path")
    generation_config = None if model.path is None else _generation_config(Path(model.path))
    config = _model_config(model, hf_config)
    return PretrainedModel(
        hf_config=hf_config,
        tokenizer=tokenizer,
        architecture=architecture_of(hf_config),
        config=config,
        source=source,
        dtype=getattr(torch, model.dtype),
        end_tokens=_end_tokens(hf_config, generation_config, tokenizer, config.vocab_size),
        folder=None if model.path is None else Path(model.path),
    )


def _end_tokens(
    hf_config: Any, generation: GenerationConfig | None, tokenizer: Any, vocab_size: int
) -> tuple[int, ...]:
    """Raises ModelError for an id outside the vocabulary."""
    found: set[int] = set()
    for where, given in (
        ("generation_config.json", None if generation is None else generation.eos_token_id),
        ("config.json", hf_config.eos_token_id),
        ("the tokenizer", tokenizer.eos_token_id),
    ):
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if odd := [token for token in ids if type(token) is not int]:
            raise ModelError(f"eos_token_id of {where} names {odd[0]!r}; it must be a token id, or a list of them")
        if outside := [token for token in ids if not 0 <= token < vocab_size]:
            raise ModelError(
                f"eos_token_id of {where} names {outside[0]}, but the model's vocabulary has {vocab_size} tokens"
            )
        found.update(ids)
    return tuple(sorted(found))


def _generation_config(folder: Path) -> GenerationConfig | None:
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"model.path={folder}: generation_config.json cannot be read: {error}") from error


def open_critic(critic: CriticConfig, actor: PretrainedModel) -> PretrainedModel:
    """Open `critic.path`, or take the actor's model. Raises as `read_critic_config` does."""
    dtype = actor.dtype if critic.dtype is None else getattr(torch, critic.dtype)
    own = replace(actor, config=read_critic_config(critic, actor.config), dtype=dtype)
    if critic.path is None:
        return own
    hf_config = read_hf_config(critic.path, "critic.path")
    architecture, source = architecture_of(hf_config), SafetensorsFolder(critic.path)
    _check_tokenizer(critic.path, actor.tokenizer)
    folder = Path(critic.path)
    return replace(own, hf_config=hf_config, architecture=architecture, source=source, folder=folder)


def _check_tokenizer(path: str, actor: Any) -> None:
    """The critic reads the actor's ids: where its folder has a tokenizer, each token of the actor's has the same id.

    Raises ModelError that names the first that has another.
    """
    if not any(next(Path(path).glob(names), None) for names in ("tokenizer*", "vocab.*", "spiece.model")):
        return
    ids, own = actor.get_vocab(), _tokenizer(path, "critic.path").get_vocab()
    for token, number in sorted(ids.items(), key=lambda item: item[1]):
        if own.get(token) != number:
            other = f"id {own[token]}" if token in own else "no id"
            raise ModelError(
                f"critic.path={path}: its tokenizer is another than the actor's: {token!r} has id {number} there and"
                f" {other} here; give a reward model with the actor's tokenizer"
            )


def _tokenizer(path: str, field: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{field}={path}: its tokenizer cannot be read: {error}") from error


def read_critic_config(critic: CriticConfig, actor: ModelConfig) -> ModelConfig:
    """The numbers of `critic.path` alone, or the actor's.

    Raises ModelError for a folder that is missing, not supported or of a smaller vocabulary than the actor's, and
    ConfigError for a setting that the critic would not read.
    """
    model = actor if critic.path is None else _read_reward_model(critic.path, actor)
    given, dense = critic.moe_aux_loss_coeff, model.num_experts is None
    if given and dense:
        raise ConfigError(f"critic.moe_aux_loss_coeff={given} would have no effect: the critic is dense; unset it")
    coefficient = actor.moe_aux_loss_coeff if given is None else given
    return replace(model, moe_aux_loss_coeff=0.0 if dense else coefficient)


def _read_reward_model(path: str, actor: ModelConfig) -> ModelConfig:
    hf_config = read_hf_config(path, "critic.path")
    try:
        model = architecture_of(hf_config).model_config(hf_config, actor.make_vocab_size_divisible_by)
    except ModelError as error:
        raise ModelError(f"critic.path={path}: {error}") from error
    if model.vocab_size < actor.vocab_size:
        raise ModelError(
            f"critic.path={path}: its vocabulary has {model.vocab_size} tokens, that of the actor's model"
            f" {actor.vocab_size}; the critic reads the actor's tokens and needs at least as many"
        )
    return model


def read_model_config(model: ModelSource) -> ModelConfig:
    """The numbers of `model.path` or `model.preset` alone. Raises as `open_model` does."""
    _check_given(model)
    if model.preset is not None:
        hf_config, _ = PRESETS.get(model.preset).fn(dict(model.preset_options))
    else:
        hf_config = read_hf_config(model.path, "model.path")
    return _model_config(model, hf_config)


def _model_config(model: ModelSource, hf_config: Any) -> ModelConfig:
    config = architecture_of(hf_config).model_config(hf_config, model.make_vocab_size_divisible_by)
    if model.moe_aux_loss_coeff and config.num_experts is None:
        raise ConfigError(
            f"model.moe_aux_loss_coeff={model.moe_aux_loss_coeff} would have no effect: the model is dense; unset it"
        )
    return replace(config, moe_aux_loss_coeff=model.moe_aux_loss_coeff)


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
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{field}={path}: config.json cannot be read: {error}") from error
