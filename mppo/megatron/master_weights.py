"""Where Megatron-core's optimizers keep the fp32 weight and Adam's moments of each model parameter."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mppo.megatron import platform

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each weight, under the names of torch's, TE's and apex's."""


@dataclass(frozen=True)
class Piece:
    """What a rank has of the fp32 weight, and so of its moments."""

    tensor: Tensor
    """Of the parameter's shape, or `[len(span)]` where it is spread."""
    span: slice
    """Where it belongs in the flattened parameter."""
    adam: torch.optim.Optimizer
    """torch's, TE's or apex's, which has `tensor` in one of its groups."""

    def named(self, name: str) -> Tensor:
        """The `weight`, or one of the moments."""
        return self.tensor.detach() if name == WEIGHT else self.adam.state[self.tensor][name]

    @torch.no_grad()
    def fill(self, weight: Tensor, moments: dict[str, Tensor]) -> None:
        """Take over this part of the whole weight and moments."""
        self.take(self._part(weight), {name: self._part(whole) for name, whole in moments.items()})

    @torch.no_grad()
    def take(self, weight: Tensor, moments: dict[str, Tensor]) -> None:
        """Take over what was such a piece. Before the first update there are no moments, and Adam makes its own."""
        self.tensor.copy_(weight)
        self.adam.state.pop(self.tensor, None)
        if moments:
            state = {name: torch.empty_like(self.tensor).copy_(moment) for name, moment in moments.items()}
            self.adam.state[self.tensor] = state

    def _part(self, whole: Tensor) -> Tensor:
        return whole.flatten()[self.span].view_as(self.tensor)


@dataclass(frozen=True)
class MasterWeight:
    """The fp32 weight that Adam updates for a parameter of the model."""

    parameter: torch.nn.Parameter
    """Of the model, whole, in the model's dtype."""
    group: dist.ProcessGroup
    """The data-parallel ranks, all of which have this parameter."""
    is_spread: bool
    """Whether a distributed optimizer spreads the fp32 weight over the group."""
    piece: Piece | None
    """None where it is spread and this rank has none of it."""

    def assemble(self, name: str, owner: int) -> Tensor:
        """The whole `weight` or moment, on rank `owner` of the group; a spread one is collective and comes in host
        memory. Elsewhere a placeholder of its shape, without memory."""
        whole = self._joined(name, owner) if self.piece is None or self.is_spread else self.piece.named(name)
        return whole if self.group.rank() == owner else torch.zeros(()).expand(self.parameter.shape)

    def _joined(self, name: str, owner: int) -> Tensor:
        """Every rank adds its piece to zeros."""
        whole = torch.zeros(self.parameter.numel(), device=platform.device())
        if self.piece is not None:
            whole[self.piece.span] = self.piece.named(name)
        dist.reduce(whole, dist.get_global_rank(self.group, owner), group=self.group)
        return whole.view(self.parameter.shape).cpu() if self.group.rank() == owner else whole


def set_count(adam: torch.optim.Optimizer, steps: int) -> None:
    """Let Adam count from here: torch's beside the moments of each weight, TE's and apex's once for a group."""
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(steps))
    else:
        for group in adam.param_groups:
            group["step"] = steps


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Those of a chain, of which there is one for the experts; without those that have nothing to update."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not part.is_stub_optimizer]


def master_weights(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[MasterWeight]:
    """One for every parameter of the chunks, in an order that all ranks of a pipeline stage share."""
    parts = optimizers_of(optimizer)
    adams = {id(x): part.optimizer for part in parts for group in part.param_groups for x in group["params"]}
    spread = {id(x): part for part in parts for x in getattr(part, "model_param_gbuf_map", ())}
    found = []
    for chunk in chunks:
        is_spread = chunk.ddp_config.use_distributed_optimizer
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for parameter in buffer.params:
                piece = _slice(parameter, spread.get(id(parameter))) if is_spread else _whole(parameter, adams)
                found.append(MasterWeight(parameter, buffer.data_parallel_group, is_spread, piece))
    return found


def _whole(parameter: torch.nn.Parameter, adams: dict[int, torch.optim.Optimizer]) -> Piece:
    """All of it. Megatron hangs the fp32 copy of a bf16 parameter on it."""
    tensor = getattr(parameter, "main_param", parameter)
    return Piece(tensor, slice(0, parameter.numel()), adams[id(tensor)])


def _slice(parameter: torch.nn.Parameter, part: DistributedOptimizer | None) -> Piece | None:
    """What this rank has of a parameter that a distributed optimizer spreads."""
    if part is None:
        return None
    group, place = part.model_param_group_index_map[parameter]
    span = part._get_model_param_range_map(parameter)["param"]
    return Piece(part.optimizer.param_groups[group]["params"][place], slice(span.start, span.end), part.optimizer)
