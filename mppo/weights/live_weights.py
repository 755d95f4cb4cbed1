"""The parameters of this process's Megatron chunks as the source of a plan."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from mppo.errors import ModelError
from mppo.megatron.collectives import fail_together
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.weights.architectures import OUTPUT, TIED_OUTPUT, VALUE_HEAD, Architecture, Parameter
from mppo.weights.megatron_layout import Stages, megatron_layout
from mppo.weights.transfer_plan import LARGEST_SEND, HFTensor, Layout, Plan, plan, whole_tensors

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
    def name(self) -> str:
        """That in layouts."""
        return self.table.name(self.layer, self.expert)

    @property
    def hf_names(self) -> list[str]:
        return self.table.hf_names(self.layer, self.expert)


def local_parameters(
    chunks: list[torch.nn.Module], architecture: Architecture, value_head: bool
) -> list[LocalParameter]:
    """Every parameter of this rank's chunks. Raises ModelError for one the table does not know."""
    rows = {name: row for row in architecture.parameters for name in row.names}
    found = []
    for chunk in unwrap_model(chunks):
        tied = chunk.share_embeddings_and_output_weights
        head = VALUE_HEAD if value_head else TIED_OUTPUT if tied else OUTPUT
        for name, tensor in chunk.named_parameters():
            layer, expert, pattern = -1, -1, name
            if match := _LAYER_NUMBER.search(name):
                module = chunk.decoder.layers[int(match[1])]
                layer = module.layer_number - 1
                pattern = _LAYER_NUMBER.sub("decoder.layers.{layer}.", name)
                if match := _EXPERT_NUMBER.search(name):
                    expert = module.mlp.local_expert_indices[int(match[2])]
                    pattern = _EXPERT_NUMBER.sub(r"\1{expert}", pattern)
            row = head if pattern in head.names else rows.get(pattern)
            if row is None:
                raise ModelError(f"the table of {architecture.hf_name} has no row for Megatron's parameter {name}")
            found.append(LocalParameter(row, layer, expert, tensor))
    return found


@dataclass(eq=False)
class LiveWeights:
    """This rank's tensors, and the layout of all ranks'. Plans are made once for each target.

    The tensors are the parameters themselves: whoever reads them has them on the device (`Role.onloaded_weights`).
    """

    layout: Layout
    tensors: Mapping[str, Tensor]
    rank: int = 0
    _plans: dict[Layout, Plan] = field(default_factory=dict)

    @classmethod
    def of_chunks(
        cls,
        chunks: list[torch.nn.Module],
        architecture: Architecture,
        model: ModelConfig,
        topology: Topology,
        *,
        value_head: bool = False,
    ) -> "LiveWeights":
        """Collective: pipeline stages tell each other their layers; all else follows from the parallel sizes.

        Raises ModelError, on every rank, when the chunks of one do not hold what follows.
        """
        local = local_parameters(chunks, architecture, value_head)
        rows = architecture.rows(model, value_head)
        layout = megatron_layout(rows, model, topology, _stages(chunks, topology), local[0].tensor.dtype)
        with fail_together():
            check_agreement(layout, local, topology.rank)
        return cls(layout, {p.name: p.tensor for p in local}, topology.rank)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> "LiveWeights":
        """Whole Hugging Face tensors on one process."""
        whole = {name: HFTensor(tuple(tensor.shape), 0, tensor.dtype) for name, tensor in tensors.items()}
        return cls(whole_tensors(whole, {0: list(whole)}), tensors)

    def plan_for(self, target: Layout, largest: int = LARGEST_SEND) -> Plan:
        """The same on every rank, if all ask for the same target. `largest` (bytes of a send) counts the first time."""
        if target not in self._plans:
            self._plans[target] = plan(self.layout, target, largest)
        return self._plans[target]


def _stages(chunks: list[torch.nn.Module], topology: Topology) -> Stages:
    mine = tuple(tuple(layer.layer_number - 1 for layer in chunk.decoder.layers) for chunk in unwrap_model(chunks))
    stages: list[tuple[tuple[int, ...], ...]] = [()] * topology.pp
    dist.all_gather_object(stages, mine, group=topology.pp_group)
    return tuple(stages)


def check_agreement(layout: Layout, local: list[LocalParameter], rank: int) -> None:
    """Raises ModelError when a rank's parameters have other names, shapes or types than its layout says."""
    expected = layout.holdings[rank].shapes
    found = {p.name: tuple(p.tensor.shape) for p in local}
    if found != expected:
        names = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
        raise ModelError(
            f"rank {rank} holds {names[0]} of shape {found.get(names[0])}, by its layout it would have"
            f" {expected.get(names[0])}; {len(names)} parameters differ"
        )
    dtypes = {p.tensor.dtype for p in local}
    if dtypes != {tensor.dtype for tensor in layout.tensors.values()}:
        raise ModelError(
            f"rank {rank} holds parameters of other types than its layout: {', '.join(sorted(map(str, dtypes)))}"
        )
