"""The hook: PPO's losses as the closure of Megatron-core's own pipeline schedules.

    from megatron.core.pipeline_parallel import get_forward_backward_func
    step = ForwardStep(PolicyObjective(...))
    get_forward_backward_func()(forward_step_func=step, data_iterator=iter(micro_batches), model=chunk, ...)

The closure returns Megatron's triple `(loss, num_tokens, statistics)`. With `calculate_per_token_loss` Megatron
all-reduces num_tokens over DP x CP and divides the gradients once by the total N; so the closure multiplies its
weights, which are those of the global mini-batch, by N. For token-mean that product is exactly 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mppo.algorithm.statistics import Ratio
from mppo.batch.packed import PackedBatch
from mppo.megatron import platform
from mppo.megatron.layers import packed_seq_params

Triple = tuple[Tensor, Tensor, dict[str, Ratio]]


class Objective(Protocol):
    """Model output of one micro-batch -> `(loss, num_tokens, statistics)`."""

    def __call__(self, output: Tensor, micro_batch: PackedBatch) -> Triple: ...


class ForwardStep:
    """Megatron's `forward_step_func`: runs the model on the next micro-batch and supplies the closure.

    `closure(output, micro_batch)` sees the last stage's output, `[T, V/tp]` logits or `[T, 1]` values.
    """

    def __init__(self, closure: Callable[[Tensor, PackedBatch], Any]):
        self.closure = closure

    def __call__(self, data_iterator, model) -> tuple[Tensor, Callable]:
        micro_batch = next(data_iterator).to(platform.device())
        output = model(
            input_ids=micro_batch.tokens[None],
            position_ids=micro_batch.positions[None],
            attention_mask=None,
            packed_seq_params=packed_seq_params(micro_batch.cu_seqlens, platform.device()),
        )
        return output, partial(self._close, micro_batch)

    def _close(self, micro_batch: PackedBatch, output: Tensor, non_loss_data: bool = False) -> Any:
        return self.closure(output.squeeze(0), micro_batch)


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
