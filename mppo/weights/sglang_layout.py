"""How the parameters of an SGLang tensor-parallel worker are made of Hugging Face tensors.

Read in SGLang 0.5.23, and compared with what its own loaders build (`tests/sglang/test_sglang_layout.py`). It holds for
unquantised Llama, Qwen2, Qwen3 and Qwen3-MoE on one pipeline stage, without attention data parallelism, redundant
experts or LoRA, and for kernels that leave weights as they were loaded: AMX on CPU, AITER, the `flashinfer_trtllm`
expert backend and `SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED` repack them (`process_weights_after_loading`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mppo.errors import ConfigError
from mppo.megatron.model_config import ModelConfig
from mppo.weights.architectures import Architecture, Parameter
from mppo.weights.cuts import Cut, FeedForwardColumns, GateUp, HeadColumns, Replicated, Slice
from mppo.weights.shards import Shard, hf_tensors, holding
from mppo.weights.transfer_plan import Layout

VOCABULARY_BLOCK = 64
"""`DEFAULT_VOCAB_PADDING_SIZE` of srt/layers/vocab_parallel_embedding.py."""


class Worker(NamedTuple):
    """A tensor-parallel rank of a server."""

    server: int
    tp_rank: int


@dataclass(frozen=True)
class MergedQueryKeyValue:
    """Sources q, k, v: the rows of this worker's query heads, then those of its key heads, then of its value heads.

    With more workers than key/value heads, neighbours share a head (`QKVParallelLinear`, srt/layers/linear.py).
    """

    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        queries = model.num_attention_heads // tp * model.head_dim
        sharing = max(1, tp // model.num_query_groups)
        keys = max(1, model.num_query_groups // tp) * model.head_dim
        first = tp_rank // sharing * keys
        return [
            Slice(0, tp_rank * queries, (tp_rank + 1) * queries),
            Slice(1, first, first + keys),
            Slice(2, first, first + keys),
        ]


@dataclass(frozen=True)
class BlockPaddedRows:
    """Rows of the vocabulary, padded to a multiple of 64, or where workers do not divide that, of 64 times their
    number (`VocabParallelEmbedding.__init__` and `.weight_loader`, srt/layers/vocab_parallel_embedding.py)."""

    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        padded = _rounded_up(model.vocab_size, VOCABULARY_BLOCK)
        if padded % tp:
            padded = _rounded_up(model.vocab_size, VOCABULARY_BLOCK * tp)
        size = padded // tp
        start, stop = (min(bound, model.vocab_size) for bound in (tp_rank * size, (tp_rank + 1) * size))
        real = [Slice(0, start, stop)] if start < stop else []
        return real + ([Slice(-1, 0, size - (stop - start))] if stop - start < size else [])


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP, _EXPERT = _LAYER + "self_attn.", _LAYER + "mlp.", _LAYER + "mlp.experts.{expert}."


def _same(name: str, cut: Cut, is_vector: bool = False) -> Parameter:
    """A parameter that has the name of the one tensor it is made of."""
    return Parameter((name,), (name,), cut, is_vector)


def _merged_qkv(kind: str) -> Parameter:
    hf = tuple(_ATTENTION + f"{x}_proj.{kind}" for x in "qkv")
    return Parameter((_ATTENTION + f"qkv_proj.{kind}",), hf, MergedQueryKeyValue(), is_vector=kind == "bias")


_SHARED = (
    _same("model.embed_tokens.weight", BlockPaddedRows()),
    _same("model.norm.weight", Replicated("hidden_size"), is_vector=True),
    _same(_LAYER + "input_layernorm.weight", Replicated("hidden_size"), is_vector=True),
    _same(_LAYER + "post_attention_layernorm.weight", Replicated("hidden_size"), is_vector=True),
    _merged_qkv("weight"),
    _same(_ATTENTION + "o_proj.weight", HeadColumns()),
)
_FEED_FORWARD = (
    Parameter((_MLP + "gate_up_proj.weight",), (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"), GateUp()),
    _same(_MLP + "down_proj.weight", FeedForwardColumns()),
)
_EXPERTS = (
    _same(_MLP + "gate.weight", Replicated("num_experts")),
    Parameter(
        (_MLP + "experts.w13_weight",),
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        GateUp("moe_ffn_hidden_size"),
        stacked=True,
    ),
    Parameter(
        (_MLP + "experts.w2_weight",),
        (_EXPERT + "down_proj.weight",),
        FeedForwardColumns("moe_ffn_hidden_size"),
        stacked=True,
    ),
)
_QK_NORM = tuple(_same(_ATTENTION + f"{x}_norm.weight", Replicated("head_dim"), is_vector=True) for x in "qk")
_OUTPUT = _same("lm_head.weight", BlockPaddedRows())
_TIED_OUTPUT = Parameter(_OUTPUT.names, ("model.embed_tokens.weight",), BlockPaddedRows())


def sglang_rows(architecture: Architecture, model: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of SGLang's class for the architecture (srt/models/{llama,qwen2,qwen3,qwen3_moe}.py).

    A tied output layer is the embedding itself, but for Qwen3-MoE, which always has one of its own.
    """
    rows = _SHARED + (_EXPERTS if architecture.experts else _FEED_FORWARD)
    rows += (_merged_qkv("bias"),) if architecture.qkv_bias else ()
    rows += _QK_NORM if architecture.qk_norm else ()
    if not model.tie_word_embeddings:
        return (*rows, _OUTPUT)
    return (*rows, _TIED_OUTPUT) if architecture.experts else rows


def sglang_layout(
    architecture: Architecture,
    model: ModelConfig,
    tp: int,
    dtype: torch.dtype,
    *,
    ep: int = 1,
    servers: Iterable[int] = (0,),
) -> Layout:
    """What every `Worker` of servers with `--tp-size tp --ep-size ep` holds, under SGLang's own names.

    Of `tp` workers `tp / ep` share each expert; neighbours do (`moe_ep_rank`, `moe_tp_rank`,
    srt/runtime_context.py). Raises ConfigError for a number of workers that SGLang would refuse.
    """
    _check_sizes(model, tp, ep)
    rows = sglang_rows(architecture, model)
    held = [holding(_shard(model, rank, tp, ep), rows, model) for rank in range(tp)]
    return Layout(
        hf_tensors(rows, model, dtype),
        {Worker(server, rank): held[rank] for server in servers for rank in range(tp)},
    )


def _shard(model: ModelConfig, rank: int, tp: int, ep: int) -> Shard:
    etp, experts = tp // ep, (model.num_experts or 0) // ep
    first_expert = rank // etp * experts
    return Shard(
        layers=tuple(range(model.num_layers)),
        first=True,
        last=True,
        tp_rank=rank,
        tp=tp,
        etp_rank=rank % etp,
        etp=etp,
        experts=tuple(range(first_expert, first_expert + experts)),
    )


def _check_sizes(model: ModelConfig, tp: int, ep: int) -> None:
    if tp % ep:
        raise ConfigError(f"SGLang's ep-size {ep} does not divide its tp-size {tp}")
    groups = model.num_query_groups
    if groups % tp and tp % groups:
        raise ConfigError(f"SGLang's tp-size {tp} and the {groups} key/value heads: neither divides the other")
    dense = (model.ffn_hidden_size, tp, "columns")
    for number, ranks, what in (
        (model.num_attention_heads, tp, "attention heads"),
        dense if model.num_experts is None else (model.moe_ffn_hidden_size, tp // ep, "columns"),
        (model.num_experts or 0, ep, "experts"),
    ):
        if number % ranks:
            raise ConfigError(f"SGLang's {ranks} workers do not divide the {number} {what}; use another tp-size")
