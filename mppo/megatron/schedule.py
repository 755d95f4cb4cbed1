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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
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


@dataclass(frozen=True)
class HostWork:
    """What the host works out of a micro-batch before the device is given any of it: all that reads its content."""

    whole: PackedBatch
    lengths: tuple[int, ...]
    """Of whole sequences, of which a context-parallel rank holds a part."""
    padding: Tensor | None
    """`[1, T or T/tp]` bool: see `_padding_mask`."""
    rows: Tensor | None = None
    """`[A]`: what the last chunk projects."""
    actions: PackedBatch | None = None
    """Those rows as a batch."""

    @classmethod
    def of(cls, whole: PackedBatch, model: torch.nn.Module, wants_hidden: bool) -> "HostWork":
        config = get_model_config(model)
        lengths = tuple(length * config.context_parallel_size for length in whole.lengths)
        work = cls(whole, lengths, _padding_mask(whole, model))
        if not unwrap_model(model).post_process:
            return work
        rows, actions = whole.actions()
        if not wants_hidden:  # where hidden states are handed on, context-parallel ranks must agree on S
            actions = actions.pad_to_multiple(config.tensor_model_parallel_size if config.sequence_parallel else 1)
        actions.segments  # noqa: B018  (worked out once, here)
        return replace(work, rows=torch.cat([rows, rows.new_zeros(len(actions) - len(rows))]), actions=actions)


class ForwardStep:
    """Megatron's `forward_step_func`: runs the model on the next micro-batch and supplies the closure.

    Only actions are projected: the last stage's head sees the A hidden states that the mask selects, never those of the
    prompt. A closure with `wants_hidden` gets them as `LastHidden` and projects in chunks; another gets what the
    output layer makes of them, `[A, 1]` values. The batch of those A positions comes with it.
    """

    def __init__(self, closure: Closure):
        self.closure = closure

    def __call__(self, data_iterator, model) -> tuple[Tensor, Callable]:
        work, device = HostWork.of(next(data_iterator), model, self.closure.wants_hidden), platform.device()
        if work.rows is None or work.actions is None:
            return _run(model, work), _no_closure
        head_of(model).select(to_device(work.rows, device), projects=not self.closure.wants_hidden)
        return _run(model, work), partial(self._close, work.actions.to(device), model)

    def _close(self, actions: PackedBatch, model, output: Tensor, non_loss_data: bool = False) -> Any:
        output = output.squeeze(0)
        if not self.closure.wants_hidden:
            return self.closure(output, actions)
        return self.closure(LastHidden(output, output_weight(model)), actions)


def _run(model: torch.nn.Module, work: HostWork) -> Tensor:
    batch, device, rotary = work.whole, platform.device(), rotary_of(unwrap_model(model))
    positions = to_device(batch.positions, device)
    if rotary is not None:
        rotary.place(positions)
    return model(
        input_ids=to_device(batch.token_ids, device)[None],
        position_ids=positions[None],
        attention_mask=None,
        padding_mask=None if work.padding is None else to_device(work.padding, device),
        packed_seq_params=packed_seq_params(work.lengths, "thd" if rotary is None else "sbhd"),
        **({"fp32_output": False} if _casts_output(model) else {}),  # the closure takes hidden states as they are
    )


def _casts_output(model: torch.nn.Module | None) -> bool:
    """Whether one of the wrappers of a model chunk would copy its output to float32."""
    return model is not None and (isinstance(model, Float16Module) or _casts_output(getattr(model, "module", None)))


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
    padding = ~batch.real[None]
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
