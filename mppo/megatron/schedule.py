"""The hook: PPO's losses as the closure of Megatron-core's own pipeline schedules.

    from megatron.core.pipeline_parallel import get_forward_backward_func
    install_head(chunk)  # once, before DDP wraps it (mppo.megatron.output_layer)
    step = ForwardStep(PolicyObjective(...))
    get_forward_backward_func()(forward_step_func=step, data_iterator=iter(micro_batches), model=chunk, ...)

The closure returns Megatron's triple `(loss, num_tokens, statistics)`. With `calculate_per_token_loss` Megatron
all-reduces num_tokens over DP x CP and divides the gradients once by the total N; so the closure multiplies its
weights, which are those of the global mini-batch, by N. What is counted are all tokens of the trajectories.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mppo.batch.packed import PackedBatch, to_device
from mppo.megatron import platform
from mppo.megatron.attention import packed_seq_params
from mppo.megatron.head import LastHidden
from mppo.megatron.output_layer import head_of, output_weight
from mppo.megatron.rotary import rotary_of
from mppo.megatron.stage_links import StageLinks, process_groups
from mppo.megatron.topology import virtual_pipeline


class Closure(Protocol):
    """What is made of the output of the last model chunk: a loss with its statistics, or what a pass is for."""

    @property
    def wants_hidden(self) -> bool:
        """Whether it gets the hidden states of the actions (`LastHidden`) instead of the output layer's values."""

    def __call__(self, output: Any, batch: PackedBatch, /) -> Any: ...


class ForwardStep:
    """Megatron's `forward_step_func`: runs the model on the next micro-batch and supplies the closure.

    Only actions are projected: the last stage's head sees the A hidden states that the mask selects, never those of the
    prompt. A closure with `wants_hidden` gets them as `LastHidden` and projects in chunks; another gets what the
    output layer makes of them, `[A, 1]` values. The batch of those A positions comes with it.
    """

    def __init__(self, closure: Closure):
        self.closure = closure

    def __call__(self, data_iterator, model) -> tuple[Tensor, Callable]:
        whole = next(data_iterator)
        if not unwrap_model(model).post_process:
            return _run(model, whole), _no_closure
        rows, actions = self._actions(whole, get_model_config(model))
        head_of(model).select(to_device(rows, platform.device()), projects=not self.closure.wants_hidden)
        return _run(model, whole), partial(self._close, actions.to(platform.device()), model)

    def _actions(self, whole: PackedBatch, config: TransformerConfig) -> tuple[Tensor, PackedBatch]:
        """The rows that are projected, and their batch."""
        rows, actions = whole.actions()
        if not self.closure.wants_hidden:  # where hidden states are handed on, context-parallel ranks must agree on S
            actions = actions.pad_to_multiple(config.tensor_model_parallel_size if config.sequence_parallel else 1)
        return torch.cat([rows, rows.new_zeros(len(actions) - len(rows))]), actions

    def _close(self, actions: PackedBatch, model, output: Tensor, non_loss_data: bool = False) -> Any:
        output = output.squeeze(0)
        if not self.closure.wants_hidden:
            return self.closure(output, actions)
        return self.closure(LastHidden(output, output_weight(model)), actions)


def _run(model: torch.nn.Module, batch: PackedBatch) -> Tensor:
    config, positions = get_model_config(model), to_device(batch.positions, platform.device())
    rotary = rotary_of(unwrap_model(model))
    if rotary is not None:
        rotary.place(positions)
    qkv_format = "thd" if rotary is None else "sbhd"
    return model(
        input_ids=to_device(batch.token_ids[None], platform.device()),
        position_ids=positions[None],
        attention_mask=None,
        padding_mask=_padding_mask(batch, model),
        packed_seq_params=packed_seq_params(batch.cu_seqlens, config.context_parallel_size, qkv_format),
        **({"fp32_output": False} if config.bf16 else {}),  # of Float16Module: the closure takes them as they are
    )


def _no_closure(*_, **__) -> None:
    """Of a model chunk that is not the last, whose output Megatron only sends on."""
    raise AssertionError("only the last model chunk has a loss")


def _padding_mask(batch: PackedBatch, model: torch.nn.Module) -> Tensor | None:
    """`[1, T]` bool: what the load-balancing loss of a mixture of experts leaves out; None for a dense model.

    Under sequence parallelism Megatron's first stage cuts it; `[1, T/tp]` on later ones, where nothing else would.
    """
    config = get_model_config(model)
    if config.num_moe_experts is None:
        return None
    padding = to_device(~batch.real[None], platform.device())
    if config.sequence_parallel and not unwrap_model(model).pre_process:
        padding = padding.chunk(config.tensor_model_parallel_size, dim=1)[get_tensor_model_parallel_rank()]
    return padding


def run_schedule(
    chunks: list[torch.nn.Module],
    micro_batches: list[PackedBatch],
    closure: Closure,
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Put micro-batches through Megatron's schedule: none, 1F1B or interleaved, as the chunks were built for.

    Returns, on the last pipeline stage, the statistics (or with `forward_only`, what the closure returned) of each
    micro-batch in order; elsewhere an empty list. Gradients are in the chunks' buffers, reduced and scaled.
    """
    config, links = get_model_config(chunks[0]), {}
    if config.pipeline_model_parallel_size > 1:
        lengths = [len(piece) for piece in micro_batches]
        links = {"p2p_communicator": StageLinks(config, lengths), "pg_collection": process_groups()}
    iterators = [iter(micro_batches) for _ in chunks]
    with virtual_pipeline(config.virtual_pipeline_model_parallel_size), torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=ForwardStep(closure),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches[0]),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **links,
        )
