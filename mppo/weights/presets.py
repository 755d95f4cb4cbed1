"""Small models that need no download: a Hugging Face configuration and a tokenizer, from random initialisation."""

from collections.abc import Callable
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from mppo.errors import ConfigError
from mppo.registry import Registry

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=<>()?:;,. !#$%&/@^_|~["

PRESETS: Registry[Callable[[dict[str, Any]], tuple[Any, Any]]] = Registry("model preset")


_SIZES = {
    "vocab_size": len(CHARACTERS) + 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": len(CHARACTERS),
    "pad_token_id": len(CHARACTERS) + 1,
}


@PRESETS.register("char")
def char(options: dict[str, Any]) -> tuple[LlamaConfig, PreTrainedTokenizerFast]:
    """A Llama of 2 layers and hidden size 64 over 64 characters. `options` change fields of its configuration."""
    config = _configured(LlamaConfig, {**_SIZES, "architectures": ["LlamaForCausalLM"]}, options)
    return config, _character_tokenizer()


@PRESETS.register("char-moe")
def char_moe(options: dict[str, Any]) -> tuple[Qwen3MoeConfig, PreTrainedTokenizerFast]:
    """The same sizes as a Qwen3-MoE: each token goes to 2 of 4 experts of 64 columns."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    fields = {**_SIZES, **experts, "head_dim": 16, "architectures": ["Qwen3MoeForCausalLM"]}
    return _configured(Qwen3MoeConfig, fields, options), _character_tokenizer()


def _configured(of: type[PreTrainedConfig], fields: dict[str, Any], options: dict[str, Any]) -> Any:
    for name in options:
        if name not in fields and not hasattr(of(), name):
            what = of.__name__.removesuffix("Config")
            raise ConfigError(f"model.preset_options.{name} is not a field of a {what} configuration")
    try:
        return of(**{**fields, **options})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"model.preset_options: {error}") from error


def _character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate([*CHARACTERS, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
