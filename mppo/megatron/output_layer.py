"""What stands behind the last decoder layer: a projection that sees only the rows it is told of, and the value head."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import unwrap_model
from torch import Tensor

from mppo.errors import ConfigError
from mppo.megatron import platform


class ValueHead(torch.nn.Module):
    """A scalar per position in place of the output layer, with its calling convention. Starts at zero."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        zeros = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=platform.device())
        self.weight = torch.nn.Parameter(zeros)
        self.sequence_parallel = config.sequence_parallel
        # Megatron's mark of a parameter whose gradient tensor-parallel ranks have parts of
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """hidden `[T or T/tp, 1, H]`, weight `[1, H]` (None: its own) -> values `[T, 1, 1]` in float32."""
        values = torch.nn.functional.linear(hidden.float(), (self.weight if weight is None else weight).float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class RowSelectingOutput(torch.nn.Module):
    """An output layer that works on the rows of the hidden states it was told of, once for each `select`.

    It stands in the place of Megatron's output layer or of a value head, and holds their weight under the same name, so
    that `output_layer.weight` stays what it was in checkpoints, for tied embeddings and for the optimizer. A pipeline
    schedule runs the forward pass of one micro-batch at a time, so the rows are those of the micro-batch whose forward
    pass comes next; the backward pass has its own copy. Recomputation ends before the output layer. Without a `select`
    it is the layer that it wraps.
    """

    projection: ColumnParallelLinear | ValueHead

    def __init__(self, projection: ColumnParallelLinear | ValueHead):
        super().__init__()
        self.register_parameter("weight", projection.weight)
        self.__dict__["projection"] = projection  # no submodule, or its weight would be in the state dict twice
        self._rows: Tensor | None = None
        self._projects = True
        self._register_load_state_dict_pre_hook(_without_extra_state)

    def select(self, rows: Tensor, *, projects: bool) -> None:
        """Of the next forward pass: only `rows [A]` of the hidden states `[T]` are projected, or only handed on.

        Under sequence parallelism A must divide by the tensor-parallel size where they are projected.
        """
        self._rows, self._projects = rows, projects

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden `[T or T/tp, 1, H]` -> `[A, 1, V/tp]` logits, `[A, 1, 1]` values, or `[A, 1, H]`, and None (no bias).

        Hidden states that are handed on are whole on each tensor-parallel rank, which adds its part to their gradient.
        """
        rows, self._rows = self._rows, None
        if rows is not None and not self._projects:
            return self._whole(hidden, is_partial=True).index_select(0, rows), None
        if rows is not None:
            hidden = self._whole(hidden, is_partial=False).index_select(0, rows)
            hidden = scatter_to_sequence_parallel_region(hidden) if self.sequence_parallel else hidden
        return self.projection(hidden, self.weight if weight is None else weight, runtime_gather_output)

    def _whole(self, hidden: Tensor, is_partial: bool) -> Tensor:
        """All rows. `is_partial`: each tensor-parallel rank has a part of their gradient, to be added up."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=is_partial)
        return copy_to_tensor_model_parallel_region(hidden) if is_partial else hidden

    @property
    def sequence_parallel(self) -> bool:
        """Whether hidden states come cut over tensor-parallel ranks; Megatron switches it off to generate."""
        return self.projection.sequence_parallel

    @sequence_parallel.setter
    def sequence_parallel(self, value: bool) -> None:
        self.projection.sequence_parallel = value

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """As the layer that it wraps; a value head, which is not cut, is a replica on each tensor-parallel rank."""
        return sharded_state_dict_default(self.projection, *args, tp_group=get_tensor_model_parallel_group(), **kwargs)

    def get_extra_state(self) -> None:
        """Megatron's layers have an empty one; so checkpoints are the same with and without this module."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""


def _without_extra_state(state_dict: dict, prefix: str, *_: Any) -> None:
    state_dict.setdefault(f"{prefix}_extra_state")


def install_head(model: torch.nn.Module) -> None:
    """Let `ForwardStep` choose the rows of the output layer of a model chunk; for chunks without one nothing happens.

    Called once, after a `GPTModel` is built and before Megatron's DDP wraps it, which looks at its modules.
    """
    chunk: GPTModel = unwrap_model(model)
    if chunk.post_process and not isinstance(chunk.output_layer, RowSelectingOutput):
        chunk.output_layer = RowSelectingOutput(chunk.output_layer)


def head_of(model: torch.nn.Module) -> RowSelectingOutput:
    """The output layer of a last model chunk. Raises ConfigError if `install_head` was forgotten."""
    layer = unwrap_model(model).output_layer
    if not isinstance(layer, RowSelectingOutput):
        raise ConfigError(
            "the model's output layer cannot select rows: call mppo.megatron.output_layer.install_head(model) after"
            " building the GPTModel, before DistributedDataParallel wraps it"
        )
    return layer


def output_weight(model: torch.nn.Module) -> Tensor:
    """`[V/tp, H]`: the projection of a last model chunk, which a tied model shares with its embedding."""
    chunk = unwrap_model(model)
    tied = chunk.share_embeddings_and_output_weights
    return chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
