"""The hook: PPO's losses as the closure of Megatron-core's own pipeline schedules.

    from megatron.core.pipeline_parallel import get_forward_backward_func
    step = ForwardStep(PolicyObjective(...))
    get_forward_backward_func()(forward_step_func=step, data_iterator=iter(micro_batches), model=chunk, ...)

The closure returns Megatron's triple `(loss, num_tokens, statistics)`. With `calculate_per_token_loss` Megatron
all-reduces num_tokens over DP x CP and divides the gradients once by the total N; so the closure multiplies its
weights, which are those of the global mini-batch, by N. For token-mean that product is exactly 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mppo.algorithm.statistics import Ratio
from mppo.batch.packed import PackedBatch
from mppo.megatron import platform
from mppo.megatron.layers import packed_seq_params

Triple = tuple[Tensor, Tensor, dict[str, Ratio]]


class Objective(Protocol):
    """Model output of the actions of one micro-batch -> `(loss, num_tokens, statistics)`."""

    def __call__(self, output: Tensor, actions: PackedBatch) -> Triple: ...


class ForwardStep:
    """Megatron's `forward_step_func`: runs the model on the next micro-batch and supplies the closure.

    Only actions are projected: the output layer sees the A hidden states that the mask selects, never those of the
    prompt. `closure(output, actions)` gets `[A, V/tp]` logits or `[A, 1]` values, and the batch of those A positions.
    """

    def __init__(self, closure: Callable[[Tensor, PackedBatch], Any]):
        self.closure = closure

    def __call__(self, data_iterator, model) -> tuple[Tensor, Callable]:
        whole, device = next(data_iterator), platform.device()
        config = get_model_config(model)
        rows, actions = whole.actions()
        actions = actions.pad_to_multiple(config.tensor_model_parallel_size if config.sequence_parallel else 1)
        rows = torch.cat([rows, rows.new_zeros(len(actions) - len(rows))])
        with _projecting_only(rows.to(device), model):
            output = model(
                input_ids=whole.tokens[None].to(device),
                position_ids=whole.positions[None].to(device),
                attention_mask=None,
                packed_seq_params=packed_seq_params(whole.cu_seqlens, device),
            )
        return output, partial(self._close, actions.to(device))

    def _close(self, actions: PackedBatch, output: Tensor, non_loss_data: bool = False) -> Any:
        return self.closure(output.squeeze(0), actions)


@contextmanager
def _projecting_only(rows: Tensor, model: torch.nn.Module) -> Iterator[None]:
    """Let the output layer of the last stage see only `rows [A]` of the hidden states.

    Under sequence parallelism the hidden states are gathered, and what is left of them is scattered again for the
    layer, whose A must be a multiple of the tensor-parallel size.
    """

    def select(layer: torch.nn.Module, arguments: tuple) -> tuple:
        hidden, *rest = arguments
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.index_select(0, rows)
        if layer.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
        return hidden, *rest

    output_layer = getattr(unwrap_model(model), "output_layer", None)
    if output_layer is None:
        yield
        return
    handle = output_layer.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def run_schedule(
    chunks: list[torch.nn.Module],
    micro_batches: list[PackedBatch],
    closure: Callable[[Tensor, PackedBatch], Any],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Put micro-batches through Megatron's schedule: none, 1F1B or interleaved, as the parallel state has it.

    Returns, on the last pipeline stage, the statistics (or with `forward_only`, what the closure returned) of each
    micro-batch in order; elsewhere an empty list. Gradients are in the chunks' buffers, reduced and scaled.
    """
    iterators = [iter(micro_batches) for _ in chunks]
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=ForwardStep(closure),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches[0]),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
