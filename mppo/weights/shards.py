"""What one rank's share of a model consists of, from a table of parameters: the same for Megatron and for SGLang."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from mppo.megatron.model_config import ModelConfig
from mppo.weights.architectures import Parameter
from mppo.weights.cuts import Slice
from mppo.weights.transfer_plan import HFTensor, Holding, Piece, Region


@dataclass(frozen=True)
class Shard:
    """Which layers and experts a rank has, and its number among the ranks over which their parameters are cut."""

    layers: tuple[int, ...]
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the final norm and the head."""
    tp_rank: int
    tp: int
    etp_rank: int
    etp: int
    experts: tuple[int, ...] = ()
    """Numbers in the whole layer."""

    def slices(self, row: Parameter, model: ModelConfig) -> list[Slice]:
        if row.per_expert:
            return row.cut.slices(model, self.etp_rank, self.etp)
        return row.cut.slices(model, self.tp_rank, self.tp)

    def occurrences(self, row: Parameter) -> Iterator[tuple[int, int, int | None]]:
        """`(layer, expert, member)` of every parameter that this rank has of a row; -1 for what is not of a layer or
        of an expert, `member` the place in a stacked tensor."""
        if not row.per_layer:
            if self.first if row.on_first_stage else self.last:
                yield -1, -1, None
            return
        for layer in self.layers:
            if not row.per_expert:
                yield layer, -1, None
                continue
            for member, expert in enumerate(self.experts):
                yield layer, expert, member if row.stacked else None


def holding(shard: Shard, rows: Iterable[Parameter], model: ModelConfig) -> Holding:
    """The parameters of a rank, and what each of them is made of."""
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: list[Piece] = []
    padding: list[Region] = []
    for row in rows:
        slices = shard.slices(row, model)
        shape = list(row.hf_shapes(model)[0])
        shape[row.cut.dim] = sum(len(s) for s in slices)
        for layer, expert, member in shard.occurrences(row):
            shapes[row.name(layer, expert)] = (len(shard.experts), *shape) if row.stacked else tuple(shape)
            of_parameter = make_up(row, slices, layer, expert, member)
            pieces += of_parameter.pieces
            padding += of_parameter.padding
    return Holding(shapes, tuple(pieces), tuple(padding))


@dataclass(frozen=True)
class MakeUp:
    """What one parameter is made of."""

    pieces: list[Piece]
    padding: list[Region]


def make_up(row: Parameter, slices: list[Slice], layer: int, expert: int, member: int | None = None) -> MakeUp:
    """The slices of a row one after the other, as they stand in the parameter."""
    made, name, dim, start = MakeUp([], []), row.name(layer, expert), row.cut.dim, 0
    hf_names = row.hf_names(layer, expert)
    for piece in slices:
        own = Region(name, dim, start, start + len(piece), member)
        if piece.source < 0:
            made.padding.append(own)
        else:
            made.pieces.append(Piece(Region(hf_names[piece.source], dim, piece.start, piece.stop), own))
        start = own.stop
    return made


def hf_tensors(rows: Iterable[Parameter], model: ModelConfig, dtype: torch.dtype) -> dict[str, HFTensor]:
    """Every Hugging Face tensor that the rows are made of, layer by layer, the embedding first and the head last."""
    rows = tuple(rows)
    layered = [row for row in rows if row.per_layer]
    before = [row for row in rows if not row.per_layer and row.on_first_stage]
    after = [row for row in rows if not row.per_layer and not row.on_first_stage]
    numbered = [(row, -1) for row in before]
    numbered += [(row, layer) for layer in range(model.num_layers) for row in layered]
    numbered += [(row, -1) for row in after]
    found: dict[str, HFTensor] = {}
    for row, layer in numbered:
        shapes = row.hf_shapes(model)
        for expert in range(model.num_experts or 0) if row.per_expert else (-1,):
            for name, shape in zip(row.hf_names(layer, expert), shapes, strict=True):
                found.setdefault(name, HFTensor(shape, row.cut.dim, dtype))
    return found
