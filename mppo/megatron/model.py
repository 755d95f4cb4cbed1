"""Megatron-core models from a ModelConfig: policy and value chunks, and the wrappers training needs."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.config import OptimConfig, ParallelConfig, RecomputeConfig
from mppo.errors import ConfigError
from mppo.megatron import platform
from mppo.megatron.kernels import Fusions, groups_experts, uses_transformer_engine
from mppo.megatron.layers import decoder_spec
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.output_layer import ValueHead, install_head
from mppo.megatron.profiling import RangeTimers
from mppo.megatron.rotary import install_rotary
from mppo.megatron.stage_layers import megatron_layout
from mppo.megatron.topology import virtual_pipeline
from mppo.registry import nearest

MODEL_FIELDS = (
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_grouped_gemm"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "fp16", "rotary_interleaved", "window_size"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
)
"""What mppo sets of Megatron-core's configuration for some models only, or leaves as the models it knows have it."""


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    recompute: RecomputeConfig | None = None,
    passed: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron-core's configuration of a model under a layout, with the per-token loss that the hook relies on.

    `passed` are further fields of it, as `model.megatron` names them. Raises ConfigError for one that Megatron-core
    does not have, that mppo sets, or that Megatron-core refuses.
    """
    passed, settings = passed or {}, _settings(model, parallel, dtype, recompute or RecomputeConfig())
    _check_passed(passed, settings)
    try:
        return TransformerConfig(**{**settings, **vars(Fusions.of(dtype)), **passed})
    except (ValueError, AssertionError) as error:
        if not passed:
            raise
        raise ConfigError(f"model.megatron={dict(passed)}: Megatron-core refuses it: {error}") from error


def _check_passed(passed: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(TransformerConfig) if field.init}
    own = {*settings, *MODEL_FIELDS}
    for name in passed:
        if name in own:
            raise ConfigError(
                f"model.megatron.{name}: mppo sets it, from its own fields or because its losses rely on it; leave it"
                " out"
            )
        if name not in known:
            raise ConfigError(
                f"model.megatron.{name}: Megatron-core's TransformerConfig has no such field"
                f"{nearest(name, known - own)}"
            )


def _settings(
    model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, recompute: RecomputeConfig
) -> dict[str, Any]:
    """What mppo sets of Megatron-core's configuration."""
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    return dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not platform.has_cuda(),
        # Every parameter is loaded, so nothing is drawn; but the initialisation must run: it marks what tensor
        # parallelism cuts, and an unmarked weight would be left out of the gradient norm on all ranks but the first.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=megatron_layout(model, parallel),
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **_expert_settings(model, parallel, dtype),
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, dense models too
        # The interleaved schedule swaps tensors silently over batched p2p with two stages; and with overlapped p2p
        # a freed output may still be on its way.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,  # it was for a defect of torch before 2.0, and stops the host at every exchange
        deallocate_pipeline_outputs=not interleaved,
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        timers=RangeTimers(),
        **_recompute(recompute, dtype),
    )


def _recompute(recompute: RecomputeConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Raises ConfigError for what Megatron-core recomputes with Transformer Engine's layers only."""
    for module in ("layernorm", "moe_act"):
        if module in recompute.modules and not uses_transformer_engine(dtype):
            raise ConfigError(
                f"recompute.modules: {module} is recomputed by Transformer Engine's layers only (bfloat16 on a GPU);"
                " leave it out of model.recompute, or of critic.recompute if the critic alone has another dtype"
            )
    if recompute.granularity == "full":
        layers = {"recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
        return {"recompute_granularity": "full", **layers}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {}


def _expert_settings(model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A softmax over all experts before the best are taken; where their weights are made to add up to one, that is
    the softmax over the best alone. A dense model is not told of expert parallelism, which another role may have."""
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_router_topk": model.moe_topk,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_grouped_gemm": groups_experts(dtype),
    }


def _leave(weight: Tensor) -> Tensor:
    return weight


def build_chunks(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    *,
    value_head: bool = False,
    recompute: RecomputeConfig | None = None,
    passed: Mapping[str, Any] | None = None,
) -> list[MegatronModule]:
    """This rank's model chunks (one, or one per virtual stage), uninitialised but for a zero value head.

    `passed`: see `transformer_config`.
    """
    config = transformer_config(model, parallel, dtype, recompute, passed)
    vpp = parallel.virtual_pipeline_model_parallel_size
    with virtual_pipeline(vpp):
        chunks = [_build_chunk(model, config, stage, value_head) for stage in (range(vpp) if vpp else [None])]
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks


def _build_chunk(model: ModelConfig, config: TransformerConfig, vp_stage: int | None, value_head: bool) -> GPTModel:
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, vp_stage),
        vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        rope_scaling=model.rope_scaling is not None,
        rope_scaling_factor=model.rope_scaling.factor if model.rope_scaling else 8.0,
        vp_stage=vp_stage,
    )
    if value_head and chunk.post_process:
        chunk.output_layer = ValueHead(config)
    chunk = chunk.to(platform.device())
    install_head(chunk)
    install_rotary(chunk)
    return chunk


def finalize_gradients(chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron-core's `finalize_model_grads`, but for its last act: up to version 0.16 the host waits for the device
    there, to see whether the mini-batch has any tokens."""
    finalize_model_grads(chunks, None, **options)
    if num_tokens is None:
        return
    last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(num_tokens, last_stage, parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for chunk in chunks:
        chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))


def wrap_for_training(chunks: list[MegatronModule], optim: OptimConfig) -> list[DistributedDataParallel]:
    """Give the chunks gradient buffers and the data-parallel reduction, overlapped with the backward pass by choice."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=optim.grad_reduce_in_fp32,
        use_distributed_optimizer=optim.use_distributed_optimizer,
        overlap_grad_reduce=optim.overlap_grad_reduce,
        overlap_param_gather=optim.overlap_param_gather,
    )
    wrapped = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=place > 0)
        for place, chunk in enumerate(chunks)
    ]
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_gradients
    if optim.overlap_grad_reduce:  # or every micro-batch would start a reduction
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped
