"""Causal attention within packed sequences: our own, and Transformer Engine's behind the same interface."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.batch.packed import to_device
from mppo.megatron import platform

ROWS = 512
"""Queries of a call that sees more keys than it has queries: its mask is ROWS x keys."""


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Megatron's packed-sequence parameters, with the lengths on the host too, so that no layer waits for them."""

    lengths: tuple[int, ...] = ()


def packed_seq_params(lengths: Sequence[int], qkv_format: str = "thd") -> HostPackedSeqParams:
    """Of whole sequences of these lengths, of which a context-parallel rank holds a part.

    `sbhd`: Megatron treats the rows as one sequence, and our attention alone knows of the boundaries.
    """
    boundaries = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    on_device = to_device(boundaries, platform.device())
    longest = max(lengths)
    return HostPackedSeqParams(
        qkv_format=qkv_format,
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
    )


def _rows(x: Tensor) -> Tensor:
    """`[T, 1, heads, d]` or `[T, heads, d]` -> `[T, heads, d]`"""
    return x.squeeze(1) if x.dim() == 4 else x


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
        """query `[T, heads, d]`, key and value `[T, groups, d]` -> `[T, heads * d]`; with a dimension 1 after T, so too
        the output.

        Raises ValueError when the batch is not packed: mppo has no other kind.
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params (see mppo.megatron.attention.packed_seq_params)")
        attend = self._attention(_rows(query), _rows(key), _rows(value))
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
        return torch.cat(outputs).reshape(*query.shape[:-2], -1)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
        """What attends within sequences of one length, given how to take them out of a vector."""
        if self.context_parallel_size == 1:
            return partial(self._attend, query, key, value)
        group = parallel_state.get_context_parallel_group()
        keys, values = (gather_from_sequence_parallel_region(x, group=group).chunk(group.size()) for x in (key, value))
        return partial(self._attend_slices, group.rank(), query, keys, values)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, of_run: Callable[[Tensor], Tensor]) -> Tensor:
        """Whole sequences of one length."""
        return attend_at_end(of_run(query), of_run(key), of_run(value), self.softmax_scale)

    def _attend_slices(
        self, rank: int, query: Tensor, keys: list[Tensor], values: list[Tensor], of_run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Chunks `rank` and `2 cp - 1 - rank` of sequences of one length, against all keys up to each."""
        front, back = of_run(query).chunk(2, dim=2)
        k, v = (_in_order([of_run(x) for x in slices]) for slices in (keys, values))
        size, ranks = front.size(2), len(keys)
        outputs = []
        for chunk, place in ((front, rank), (back, 2 * ranks - 1 - rank)):
            end = (place + 1) * size
            outputs.append(attend_at_end(chunk, k[:, :, :end], v[:, :, :end], self.softmax_scale))
        return torch.cat(outputs, dim=2)


def attend_at_end(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last positions of sequences: `q [n, heads, a, d]` are the last a of the b positions whose
    `k` and `v` are `[n, groups, b, d]`. Returns `[n, heads, a, d]`.

    Where a < b, ROWS queries at a time see the keys up to the last of them, so that no mask is quadratic in the length
    and no key that none of them sees is multiplied.
    """
    grouped = q.size(1) != k.size(1)
    before = k.size(2) - q.size(2)
    if not before:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    outputs = []
    for start in range(0, q.size(2), ROWS):
        some = q[:, :, start : start + ROWS]
        end = before + start + some.size(2)
        seen = torch.ones(some.size(2), end, dtype=torch.bool, device=q.device).tril(before + start)
        outputs.append(
            F.scaled_dot_product_attention(some, k[:, :, :end], v[:, :, :end], seen, scale=scale, enable_gqa=grouped)
        )
    return torch.cat(outputs, dim=2)


def _in_order(slices: list[Tensor]) -> Tensor:
    """`[count, groups, length, d]` of each rank -> `[count, groups, length * cp, d]`, as the sequence runs."""
    halves = [x.chunk(2, dim=2) for x in slices]
    return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], dim=2)


def transformer_engine_attention(stock: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Transformer Engine's attention `stock` for rows that Megatron takes for one sequence (unproven: never run).

    Only it is told that they are packed; its outputs have the shape that Megatron expects of one sequence.
    """

    class PackedTransformerEngineAttention(stock):  # type: ignore[misc, valid-type]
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """query `[T, 1, heads, d]`, key and value `[T, 1, groups, d]` -> `[T, 1, heads * d]`."""
            packed = replace(kwargs.pop("packed_seq_params"), qkv_format="thd")
            rows = (_rows(x) for x in (query, key, value))
            return super().forward(*rows, *args, packed_seq_params=packed, **kwargs).reshape(len(query), 1, -1)

    return PackedTransformerEngineAttention
