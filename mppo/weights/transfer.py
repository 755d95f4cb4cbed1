"""Loading Hugging Face tensors into Megatron model chunks of any layout, and exporting them back."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core.utils import unwrap_model
from torch import Tensor

from mppo.errors import ModelError
from mppo.megatron import platform
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.weights.architectures import OUTPUT, VALUE_HEAD, Architecture, Parameter
from mppo.weights.sources import TensorSource

_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank's chunks and its row in the architecture's table."""

    table: Parameter
    layer: int
    """Number in the whole model; -1 outside the layers."""
    tensor: Tensor

    @property
    def hf_names(self) -> list[str]:
        return [name.format(layer=self.layer) for name in self.table.hf]


def local_parameters(
    chunks: list[torch.nn.Module], architecture: Architecture, value_head: bool
) -> list[LocalParameter]:
    """Every parameter of this rank's chunks. Raises ModelError for one the table does not know."""
    head = VALUE_HEAD if value_head else OUTPUT
    rows = {name: row for row in (*architecture.parameters, head) for name in row.megatron}
    found = []
    for chunk in unwrap_model(chunks):
        for name, tensor in chunk.named_parameters():
            layer, pattern = -1, name
            if match := _LAYER_NUMBER.search(name):
                layer = chunk.decoder.layers[int(match[1])].layer_number - 1
                pattern = _LAYER_NUMBER.sub("decoder.layers.{layer}.", name)
            if pattern not in rows:
                raise ModelError(f"the table of {architecture.hf_name} has no row for Megatron's parameter {name}")
            found.append(LocalParameter(rows[pattern], layer, tensor))
    return found


@torch.no_grad()
def load(
    chunks: list[torch.nn.Module],
    architecture: Architecture,
    model: ModelConfig,
    source: TensorSource,
    topology: Topology,
    *,
    value_head: bool = False,
    zero_value_head: bool = True,
) -> None:
    """Fill this rank's chunks from `source`, reading only the slices they hold.

    Raises ModelError, on every rank alike, for a tensor that is missing, of another size than config.json says, or in
    `source` but not in the table: nothing of a model is silently left out.
    """
    rows = architecture.parameters
    if value_head:
        rows += () if zero_value_head else (VALUE_HEAD,)
    elif not model.tie_word_embeddings:
        rows += (OUTPUT,)
    _check_tensors(rows, architecture, model, source)
    for parameter in local_parameters(chunks, architecture, value_head):
        if parameter.table is VALUE_HEAD and zero_value_head:
            parameter.tensor.zero_()
            continue
        names = parameter.hf_names
        if names == list(OUTPUT.hf) and model.tie_word_embeddings:
            names = ["model.embed_tokens.weight"]
        dim = parameter.table.cut.dim
        pieces = []
        for piece in parameter.table.cut.slices(model, topology.tp_rank, topology.tp):
            if piece.source < 0:
                shape = list(parameter.tensor.shape)
                shape[dim] = len(piece)
                pieces.append(torch.zeros(shape))
            else:
                pieces.append(source.read(names[piece.source], dim, piece.start, piece.stop).float())
        parameter.tensor.copy_(torch.cat(pieces, dim))


def _check_tensors(rows: tuple[Parameter, ...], architecture: Architecture, model: ModelConfig, source: TensorSource):
    """Every tensor is there, exactly as large as asked for, and none is left over; on every rank, whatever it holds."""
    known = {"lm_head.weight", "score.weight"}
    for row in rows:
        slices = row.cut.slices(model, 0, 1)
        for layer in range(model.num_layers) if row.per_layer else (-1,):
            for place, pattern in enumerate(row.hf):
                name = pattern.format(layer=layer)
                known.add(name)
                found = source.shape(name)
                asked = [model.hidden_size] * len(found)  # what is not cut is as wide as the hidden state
                asked[row.cut.dim] = max(s.stop for s in slices if s.source == place)
                if list(found) != asked:
                    raise ModelError(
                        f"{name} is {list(found)}, config.json asks for {asked}; does it belong to these weights?"
                    )
    unknown = sorted(n for n in source.names() if n not in known and not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ModelError(
            f"the model has tensors that the table of {architecture.hf_name} does not know, {unknown[0]} the first"
            f" of {len(unknown)}; a feature of it would be lost"
        )


@dataclass(frozen=True)
class Held:
    """One line of the export plan: a parameter, and the pipeline stage that holds it."""

    stage: int
    place: int
    """Which of that stage's local parameters it is."""
    table: Parameter
    hf_names: list[str]
    shard_shape: tuple[int, ...]
    dtype: torch.dtype


class Exporter:
    """Whole Hugging Face tensors from chunks of any layout, one parameter at a time, on every rank.

    What each pipeline stage holds is asked once, when this is made; every rank must make it, and go through
    `export`, at the same time.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        architecture: Architecture,
        model: ModelConfig,
        topology: Topology,
        *,
        value_head: bool = False,
    ):
        self.model, self.topology = model, topology
        self.local = local_parameters(chunks, architecture, value_head)
        mine = [
            Held(topology.pp_rank, place, p.table, p.hf_names, tuple(p.tensor.shape), p.tensor.dtype)
            for place, p in enumerate(self.local)
        ]
        stages: list[list[Held]] = [[] for _ in range(topology.pp)]
        dist.all_gather_object(stages, mine, group=topology.pp_group)
        tied = model.tie_word_embeddings
        self.plan = [h for held in stages for h in held if not (tied and h.hf_names == list(OUTPUT.hf))]

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)`, each tensor whole; a tied output layer is not repeated. Collective."""
        for held in self.plan:
            shard = self._shard(held)
            shards = [torch.empty_like(shard) for _ in range(self.topology.tp)]
            dist.all_gather(shards, shard, group=self.topology.tp_group)
            yield from zip(held.hf_names, self._assemble(held.table, shards), strict=True)

    def _shard(self, held: Held) -> Tensor:
        """This tensor-parallel rank's shard, from the stage that holds it."""
        if held.stage == self.topology.pp_rank:
            shard = self.local[held.place].tensor.detach().contiguous()
        else:
            shard = torch.empty(held.shard_shape, dtype=held.dtype, device=platform.device())
        if self.topology.pp > 1:
            group = self.topology.pp_group
            dist.broadcast(shard, dist.get_global_rank(group, held.stage), group=group)
        return shard

    def _assemble(self, table: Parameter, shards: list[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors of a parameter from the shards of all tensor-parallel ranks."""
        dim = table.cut.dim
        pieces: list[list[tuple[int, Tensor]]] = [[] for _ in table.hf]
        for tp_rank, shard in enumerate(shards):
            slices = table.cut.slices(self.model, tp_rank, self.topology.tp)
            parts = shard.split([len(s) for s in slices], dim)
            for piece, part in zip(slices, parts, strict=True):
                if piece.source >= 0:
                    pieces[piece.source].append((piece.start, part))
        whole = []
        for found in pieces:
            by_start = dict(sorted(found, key=lambda item: item[0]))  # replicated shards coincide
            whole.append(torch.cat(list(by_start.values()), dim))
        return whole


def save_hf(exporter: Exporter, hf_config: Any, tokenizer: Any, folder: str) -> None:
    """Write a Hugging Face model folder (safetensors, config.json, tokenizer). Collective; rank 0 writes."""
    tensors = {}
    for name, tensor in exporter.export():
        if exporter.topology.rank == 0:
            tensors[name] = tensor.cpu().clone()
    if exporter.topology.rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder)
        hf_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()
