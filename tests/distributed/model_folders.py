"""Small Hugging Face model folders, written by transformers itself."""

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mppo.weights.presets import _character_tokenizer

VOCABULARY = 66
"""No power of two, so that the padding of the vocabulary is cut unevenly over tensor-parallel ranks."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

OTHER_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 32}

CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "llama-tied": LlamaConfig(**COMMON | {"tie_word_embeddings": True}),
    "llama-rope": LlamaConfig(**COMMON, rope_scaling=LLAMA3_ROPE),
    "llama-mha": LlamaConfig(**COMMON | {"num_key_value_heads": 4}),
    "llama-five-layers": LlamaConfig(**COMMON | {"num_hidden_layers": 5}),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2-tied": Qwen2Config(**COMMON | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**COMMON, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-raw": Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=False),
    "reward": LlamaConfig(**COMMON, num_labels=1),
    "reward-tied": Qwen3Config(**COMMON | {"tie_word_embeddings": True}, head_dim=32, num_labels=1),
    "reward-qwen2": Qwen2Config(**COMMON | OTHER_SIZES, num_labels=1),
    "reward-qwen3-moe": Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=True, num_labels=1),
}
REWARD_MODELS = [name for name in CONFIGS if name.startswith("reward")]
EXPERT_MODELS = [name for name in CONFIGS if "moe" in name]


def write_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> Path:
    """Write `CONFIGS[name]` with random weights, norms and biases included, and a tokenizer; `changes` are of its
    configuration."""
    torch.manual_seed(len(name))
    build = AutoModelForSequenceClassification if name in REWARD_MODELS else AutoModelForCausalLM
    config = copy.deepcopy(CONFIGS[name])
    config.update(changes)
    model = build.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(_spread(name, model.config.tie_word_embeddings) * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    _character_tokenizer().save_pretrained(folder)
    return folder


def _spread(name: str, tied: bool) -> float:
    """Standard deviation of what is added to a parameter.

    A near tie of experts could go either way, and next to nothing at the first norm, which divides by its size, is
    rounding made visible; where it is the output layer too, an embedding stays small.
    """
    if name.endswith(".mlp.gate.weight"):
        return 0.2
    return 0.5 if "embed_tokens" in name and not tied else 0.02


def write_all(folder: Path) -> Path:
    """Every model of CONFIGS, each in a subfolder of its name."""
    for name in CONFIGS:
        write_model(name, folder / name)
    return folder
