"""A role's weights and optimizer through Megatron's distributed checkpointing: any layout loads another's."""

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from mppo.megatron.optimizer import Optimizer
from mppo.megatron.topology import Topology


def save_role(chunks: list[torch.nn.Module], optimizer: Optimizer, folder: Path) -> None:
    """Collective. `folder` must exist and be empty."""
    dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), str(folder))


def load_role(chunks: list[torch.nn.Module], optimizer: Optimizer, folder: Path) -> None:
    """Collective: weights, optimizer state and learning-rate schedule."""
    for distributed in _distributed(optimizer):
        _prepare_torch_adam(distributed)
    state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(folder))
    for place, chunk in enumerate(unwrap_model(chunks)):
        chunk.load_state_dict(state[f"model{place}"])
    optimizer.load_state_dict(state["optimizer"], state["scheduler"])
    for distributed in _distributed(optimizer):
        _separate_steps(distributed)


def random_state(topology: Topology) -> dict[str, Any]:
    """The random generators of this rank, as a sharded object."""
    state = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
    shape, place = (topology.pp, topology.tp), (topology.pp_rank, topology.tp_rank)
    return {
        "rng": ShardedObject("rng", state, shape, place, replica_id=topology.dp_rank * topology.cp + topology.cp_rank)
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"])


def _state(chunks: list[torch.nn.Module], optimizer: Optimizer, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        f"model{place}": chunk.sharded_state_dict(metadata=metadata) for place, chunk in enumerate(unwrap_model(chunks))
    }
    # Megatron's optimizers look for one chunk under the name "model".
    named = {"model": models["model0"]} if len(chunks) == 1 else models
    sharded = optimizer.megatron.sharded_state_dict(named, is_loading=is_loading, metadata=metadata)
    return {**models, "optimizer": sharded, "scheduler": optimizer.scheduler.state_dict()}


def _distributed(optimizer: Optimizer) -> list[DistributedOptimizer]:
    """The distributed optimizers that wrap torch's Adam; TE's and apex's need none of the help below."""
    parts = getattr(optimizer.megatron, "chained_optimizers", [optimizer.megatron])
    return [
        part
        for part in parts
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]


def _prepare_torch_adam(distributed: DistributedOptimizer) -> None:
    """torch's Adam has no state before its first step, which a load expects; and it has a `step` that has no shard."""
    adam = distributed.optimizer
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                zeros = torch.zeros_like(parameter)
                adam.state[parameter] = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    distributed._set_main_param_and_optimizer_states = MethodType(_set_states_that_came, distributed)


def _set_states_that_came(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict) -> None:
    group, place = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][place]
    for name, tensor in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors:
            tensor.copy_(tensors[name])


def _separate_steps(distributed: DistributedOptimizer) -> None:
    """A load gives all parameters one `step` tensor, which torch's Adam would advance once for each of them."""
    for state in distributed.optimizer.state.values():
        state["step"] = state["step"].clone()
