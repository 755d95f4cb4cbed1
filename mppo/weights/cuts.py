"""How a Megatron parameter is put together from Hugging Face tensors, as pure data.

One fact serves loading, export and shard plans: the local shard of any parameter is a concatenation, along one
dimension, of slices of Hugging Face tensors (and zeros, where the vocabulary is padded). A cut lists those slices
for one tensor-parallel rank.
"""

from dataclasses import dataclass
from typing import Protocol

from mppo.megatron.model_config import ModelConfig


@dataclass(frozen=True)
class Slice:
    """Rows (or columns) `[start, stop)` of the `source`-th Hugging Face tensor of a parameter; -1: zeros."""

    source: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Cut(Protocol):
    """`dim` is what the slices run along; `slices` are those of one rank, in order of the Megatron shard."""

    @property
    def dim(self) -> int: ...

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]: ...


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor, `size(model)` along dim 0."""

    size: str
    """Name of the ModelConfig field with the extent."""
    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        return [Slice(0, 0, getattr(model, self.size))]


@dataclass(frozen=True)
class Single:
    """A tensor with one row, on every rank (the scalar head)."""

    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        return [Slice(0, 0, 1)]


@dataclass(frozen=True)
class FeedForwardColumns:
    """Columns of the down projection."""

    size: str = "ffn_hidden_size"
    """Name of the ModelConfig field with the extent."""
    dim: int = 1

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        part = getattr(model, self.size) // tp
        return [Slice(0, tp_rank * part, (tp_rank + 1) * part)]


@dataclass(frozen=True)
class HeadColumns:
    """Columns of the attention's output projection: those of this rank's heads."""

    dim: int = 1

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        part = model.num_attention_heads * model.head_dim // tp
        return [Slice(0, tp_rank * part, (tp_rank + 1) * part)]


@dataclass(frozen=True)
class QueryKeyValue:
    """Sources q, k, v. Megatron interleaves by group: the queries of a key/value head, its key, its value."""

    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        groups = model.num_query_groups // tp
        queries = model.num_attention_heads // model.num_query_groups * model.head_dim
        found = []
        for group in range(tp_rank * groups, (tp_rank + 1) * groups):
            found.append(Slice(0, group * queries, (group + 1) * queries))
            found.append(Slice(1, group * model.head_dim, (group + 1) * model.head_dim))
            found.append(Slice(2, group * model.head_dim, (group + 1) * model.head_dim))
        return found


@dataclass(frozen=True)
class GateUp:
    """Sources gate, up. Each rank holds its rows of the gate, then its rows of the up projection."""

    size: str = "ffn_hidden_size"
    """Name of the ModelConfig field with the extent of each."""
    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        part = getattr(model, self.size) // tp
        return [Slice(source, tp_rank * part, (tp_rank + 1) * part) for source in (0, 1)]


@dataclass(frozen=True)
class VocabularyRows:
    """Rows of an embedding or output layer, padded with zeros at the end of the vocabulary."""

    dim: int = 0

    def slices(self, model: ModelConfig, tp_rank: int, tp: int) -> list[Slice]:
        part = model.padded_vocab_size(tp) // tp
        start, stop = tp_rank * part, (tp_rank + 1) * part
        real = [Slice(0, min(start, model.vocab_size), min(stop, model.vocab_size))]
        padding = part - len(real[0])
        return [s for s in real if len(s)] + ([Slice(-1, 0, padding)] if padding else [])
