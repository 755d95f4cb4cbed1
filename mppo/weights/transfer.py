"""Loading Hugging Face tensors into Megatron model chunks of any layout, and exporting them back."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
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
_EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.)(local_experts\.|linear_fc[12]\.weight)(\d+)")


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank's chunks and its row in the architecture's table."""

    table: Parameter
    layer: int
    """Number in the whole model; -1 outside the layers."""
    expert: int
    """Number in the whole layer; -1 for what is not of one expert."""
    tensor: Tensor

    @property
    def hf_names(self) -> list[str]:
        return self.table.hf_names(self.layer, self.expert)


def local_parameters(
    chunks: list[torch.nn.Module], architecture: Architecture, value_head: bool
) -> list[LocalParameter]:
    """Every parameter of this rank's chunks. Raises ModelError for one the table does not know."""
    head = VALUE_HEAD if value_head else OUTPUT
    rows = {name: row for row in (*architecture.parameters, head) for name in row.megatron}
    found = []
    for chunk in unwrap_model(chunks):
        for name, tensor in chunk.named_parameters():
            layer, expert, pattern = -1, -1, name
            if match := _LAYER_NUMBER.search(name):
                module = chunk.decoder.layers[int(match[1])]
                layer = module.layer_number - 1
                pattern = _LAYER_NUMBER.sub("decoder.layers.{layer}.", name)
                if match := _EXPERT_NUMBER.search(name):
                    expert = module.mlp.local_expert_indices[int(match[2])]
                    pattern = _EXPERT_NUMBER.sub(r"\1{expert}", pattern)
            if pattern not in rows:
                raise ModelError(f"the table of {architecture.hf_name} has no row for Megatron's parameter {name}")
            found.append(LocalParameter(rows[pattern], layer, expert, tensor))
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
        for piece in parameter.table.cut.slices(model, *tensor_parallel_place(parameter.table, topology)):
            if piece.source < 0:
                shape = list(parameter.tensor.shape)
                shape[dim] = len(piece)
                pieces.append(torch.zeros(shape))
            else:
                pieces.append(source.read(names[piece.source], dim, piece.start, piece.stop).float())
        parameter.tensor.copy_(torch.cat(pieces, dim))


def tensor_parallel_place(table: Parameter, topology: Topology) -> tuple[int, int]:
    """This process's number among the ranks over which a parameter is cut, and how many they are."""
    return (topology.etp_rank, topology.etp) if table.per_expert else (topology.tp_rank, topology.tp)


def _check_tensors(rows: tuple[Parameter, ...], architecture: Architecture, model: ModelConfig, source: TensorSource):
    """Every tensor is there, exactly as large as asked for, and none is left over; on every rank, whatever it holds."""
    known = {"lm_head.weight", "score.weight"}
    for row in rows:
        slices = row.cut.slices(model, 0, 1)
        layers = range(model.num_layers) if row.per_layer else (-1,)
        experts = range(model.num_experts) if row.per_expert else (-1,)
        for layer, expert in product(layers, experts):
            for place, name in enumerate(row.hf_names(layer, expert)):
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
    """One line of the export plan: a parameter, and the pipeline stage that holds it.

    Of experts it stands for those at the same place of all expert-parallel ranks.
    """

    stage: int
    place: int
    """Which of that stage's local parameters it is."""
    table: Parameter
    layer: int
    expert: int
    """Number among the experts of a rank."""
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
            Held(
                topology.pp_rank,
                place,
                p.table,
                p.layer,
                p.expert - self._first_expert(topology.ep_rank) if p.table.per_expert else -1,
                tuple(p.tensor.shape),
                p.tensor.dtype,
            )
            for place, p in enumerate(self.local)
        ]
        stages: list[list[Held]] = [[] for _ in range(topology.pp)]
        dist.all_gather_object(stages, mine, group=topology.pp_group)
        tied = model.tie_word_embeddings
        self.plan = [h for held in stages for h in held if not (tied and h.table == OUTPUT)]

    def _first_expert(self, ep_rank: int) -> int:
        return ep_rank * ((self.model.num_experts or 0) // self.topology.ep)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)`, each tensor whole; a tied output layer is not repeated. Collective."""
        for held in self.plan:
            if not held.table.per_expert:
                yield from self._whole(held, held.table.hf_names(held.layer), self.topology.tp_group, None)
                continue
            for owner in range(self.topology.ep):
                names = held.table.hf_names(held.layer, self._first_expert(owner) + held.expert)
                yield from self._whole(held, names, self.topology.etp_group, owner)

    @torch.no_grad()
    def copy_whole(self, targets: dict[str, Tensor]) -> None:
        """See `WeightSource`."""
        missing = dict(targets)
        for name, tensor in self.export():
            if name not in missing:
                raise ModelError(f"the engine's model has no tensor {name}, or it came twice")
            missing.pop(name).copy_(tensor)
        if missing:
            raise ModelError(f"the engine did not receive {', '.join(sorted(missing))}")

    def _whole(
        self, held: Held, names: list[str], group: dist.ProcessGroup, owner: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """A parameter from its shards on the ranks of `group`; `owner` is the expert-parallel rank that has it."""
        shard = self._shard(held, owner)
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard, group=group)
        yield from zip(names, self._assemble(held.table, shards), strict=True)

    def _shard(self, held: Held, owner: int | None) -> Tensor:
        """This tensor-parallel rank's shard, from the stage and the expert-parallel rank (None: all) that hold it."""
        place, mine = self.topology, owner in (None, self.topology.ep_rank)
        if mine and held.stage == place.pp_rank:
            shard = self.local[held.place].tensor.detach().contiguous()
        else:
            shard = torch.empty(held.shard_shape, dtype=held.dtype, device=platform.device())
        if mine and place.pp > 1:
            dist.broadcast(shard, dist.get_global_rank(place.pp_group, held.stage), group=place.pp_group)
        if owner is not None and place.ep > 1:
            dist.broadcast(shard, dist.get_global_rank(place.ep_group, owner), group=place.ep_group)
        return shard

    def _assemble(self, table: Parameter, shards: list[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors of a parameter from the shards of all tensor-parallel ranks."""
        dim = table.cut.dim
        pieces: list[list[tuple[int, Tensor]]] = [[] for _ in table.hf]
        for rank, shard in enumerate(shards):
            slices = table.cut.slices(self.model, rank, len(shards))
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
