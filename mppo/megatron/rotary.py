"""Rotary embedding of packed rows: each row by its own position, in one piece, whatever sequence it belongs to."""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor


class RowRotaryEmbedding(torch.nn.Module):
    """Megatron's rotary embedding, taken at the positions it was told of, once for each `place`.

    Megatron's own, for packed sequences, makes one table up to the longest and slices it for each sequence, for which
    the host reads the boundaries back from the device in every layer. Rows with an angle each need no boundaries: so
    Megatron is told that they are one sequence (`ForwardStep`), and its rotary embedding, fused or not, takes them in
    one call. Without a `place` it is the embedding that it wraps.
    """

    def __init__(self, rotary: RotaryEmbedding):
        super().__init__()
        self.rotary = rotary
        self._positions: Tensor | None = None

    def place(self, positions: Tensor) -> None:
        """Of the next forward pass: the position `[T]` of each row that this rank holds, before sequence parallelism
        cuts them."""
        self._positions = positions

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """`[T, 1, 1, d]` angles in float32."""
        positions, self._positions = self._positions, None
        if positions is None:
            return self.rotary(max_seq_len, *args, **kwargs)
        frequencies = self.rotary.inv_freq = self.rotary.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(frequencies.dtype), frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def install_rotary(chunk: GPTModel) -> None:
    """Let `ForwardStep` place the rows of a model chunk whose layers take them so (`mppo.megatron.layers`)."""
    chunk.rotary_pos_emb = RowRotaryEmbedding(chunk.rotary_pos_emb)


def rotary_of(chunk: GPTModel) -> RowRotaryEmbedding | None:
    """None: the chunk has Megatron's own."""
    rotary = chunk.rotary_pos_emb
    return rotary if isinstance(rotary, RowRotaryEmbedding) else None
