"""Layer specs: Transformer Engine's where it is installed, otherwise Megatron's local ones with our own attention."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from mppo.megatron import platform
from mppo.megatron.attention import PackedAttention, transformer_engine_attention
from mppo.megatron.kernels import uses_transformer_engine
from mppo.megatron.router import Router


class RMSNorm(torch.nn.RMSNorm):
    """The stock torch norm refuses sequence parallelism; a weight left unmarked would miss its gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=platform.device())
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (parameters have no such field)
        self.returns_residual = False  # asked for by megatron-core 0.19


def decoder_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    """The spec of one model chunk's decoder."""
    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if uses_transformer_engine(config.params_dtype):
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, **experts)
        _route(layer, config)
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = transformer_engine_attention(attention.core_attention)
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
