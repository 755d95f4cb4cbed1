"""Layer specs: Transformer Engine's where it is installed, otherwise Megatron's local ones with our own attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.batch.packed import to_device
from mppo.megatron import platform
from mppo.megatron.router import Router


class RMSNorm(torch.nn.RMSNorm):
    """The stock torch norm refuses sequence parallelism; a weight left unmarked would miss its gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (parameters have no such field)
        self.returns_residual = False  # asked for by megatron-core 0.19


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Megatron's packed-sequence parameters, with the lengths on the host too, so that no layer waits for them."""

    lengths: tuple[int, ...] = ()


def packed_seq_params(cu_seqlens: Tensor, context_parallel_size: int = 1) -> HostPackedSeqParams:
    """From the `[S+1]` boundaries on the host; under context parallelism those of this rank's slices.

    Megatron is told the boundaries of whole sequences, of which this rank holds one part in `context_parallel_size`.
    """
    whole = cu_seqlens * context_parallel_size
    on_device = to_device(whole.int(), platform.device())
    lengths = tuple(whole.diff().tolist())
    longest = max(lengths)
    return HostPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence: no padding, no look across a boundary; grouped queries.

    Neighbours of the same length are attended to in one call. Under context parallelism this rank holds two chunks of
    each sequence, one from its front and one from its back, so that all ranks have the same work (see
    `PackedBatch.context_slice`); keys and values are gathered from all ranks, their gradients scattered back.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.context_parallel_size = config.context_parallel_size

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, packed_seq_params=None, **_
    ) -> Tensor:
        """query `[T, heads, d]`, key and value `[T, groups, d]` -> `[T, heads * d]`.

        Raises ValueError when the batch is not packed: mppo has no other kind.
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params (see mppo.megatron.layers.packed_seq_params)")
        attend = self._attention(query, key, value)
        outputs, start = [], 0
        for length, run in groupby(packed_seq_params.lengths):
            count, length = len(list(run)), length // self.context_parallel_size
            rows = slice(start, start + count * length)

            def of_run(x: Tensor, rows=rows, count=count, length=length) -> Tensor:
                """`[count, heads, length, d]`"""
                return x[rows].unflatten(0, (count, length)).transpose(1, 2)

            out = attend(of_run)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            start = rows.stop
        return torch.cat(outputs).flatten(1)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
        """What attends within sequences of one length, given how to take them out of a vector."""
        if self.context_parallel_size == 1:
            return partial(self._attend, query, key, value)
        group = parallel_state.get_context_parallel_group()
        keys, values = (gather_from_sequence_parallel_region(x, group=group).chunk(group.size()) for x in (key, value))
        return partial(self._attend_slices, group.rank(), query, keys, values)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, of_run: Callable[[Tensor], Tensor]) -> Tensor:
        """Whole sequences of one length."""
        q, k, v = of_run(query), of_run(key), of_run(value)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )

    def _attend_slices(
        self, rank: int, query: Tensor, keys: list[Tensor], values: list[Tensor], of_run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Chunks `rank` and `2 cp - 1 - rank` of sequences of one length, against all keys up to each."""
        ranks = len(keys)
        q = of_run(query).chunk(2, dim=2)
        k, v = (_in_order([of_run(x) for x in slices]) for slices in (keys, values))
        outputs = []
        for chunk, place in zip(q, (rank, 2 * ranks - 1 - rank), strict=True):
            size = chunk.size(2)
            end = (place + 1) * size
            seen = torch.ones(size, end, dtype=torch.bool, device=chunk.device).tril(place * size)
            outputs.append(
                F.scaled_dot_product_attention(
                    chunk, k[:, :, :end], v[:, :, :end], seen,
                    scale=self.softmax_scale, enable_gqa=q[0].size(1) != k.size(1),
                )
            )  # fmt: skip
        return torch.cat(outputs, dim=2)


def _in_order(slices: list[Tensor]) -> Tensor:
    """`[count, groups, length, d]` of each rank -> `[count, groups, length * cp, d]`, as the sequence runs."""
    halves = [x.chunk(2, dim=2) for x in slices]
    return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], dim=2)


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Its attention takes packed sequences in half precision only; float32 goes through the local layers."""
    return platform.has_transformer_engine() and dtype != torch.float32


def groups_experts(dtype: torch.dtype) -> bool:
    """Whether the local experts run as Transformer Engine's grouped products (never tried yet), or one by one."""
    if not uses_transformer_engine(dtype):
        return False
    from megatron.core.extensions import transformer_engine

    return getattr(transformer_engine, "TEColumnParallelGroupedLinear", None) is not None


def decoder_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    """The spec of one model chunk's decoder."""
    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if uses_transformer_engine(config.params_dtype):
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, **experts)
        _route(layer, config)
        return layer
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm", **experts)
    _route(layer, config)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def _route(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Let a mixture of experts use our router."""
    if config.num_moe_experts is not None:
        mlp = layer.submodules.mlp
        parts = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]  # from 0.19 on a partial
        parts.router = Router
