"""A role's weights and optimizer through Megatron's distributed checkpointing, in one form for all of its optimizers.

For each parameter of the model: the fp32 weight, and after the first update Adam's two moments, all of the parameter's
shape and cut as Megatron cuts the parameter. So any layout and either of plain and distributed optimizer loads what
another saved, and a bf16 model is the rounded fp32 weights, as after an update. (Megatron's own forms differ between
optimizers, and cannot be loaded where there was no update yet.)
"""

from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mppo.megatron.master_weights import MOMENTS, WEIGHT, master_weights
from mppo.megatron.optimizer import Optimizer
from mppo.megatron.topology import virtual_pipeline

Shards = dict[str, dict[str, dict[str, Any]]]
"""`weight` or the name of a moment -> number of the chunk -> name in the chunk -> what is saved."""


def save_role(chunks: list[torch.nn.Module], optimizer: Optimizer, folder: Path) -> None:
    """Collective. `folder` must exist and be empty.

    The data-parallel ranks share the writing, each parameter being assembled and written by one of them.
    """
    steps = optimizer.steps
    names = (WEIGHT, *MOMENTS) if steps else (WEIGHT,)
    masters, sharded = master_weights(chunks, optimizer.megatron), _sharded_parameters(chunks)
    shards = _shards_of_buffers(chunks)
    for number, master in enumerate(masters):
        owner = number % master.group.size()
        for name in names:
            data = master.assemble(name, owner)
            _add(shards, name, sharded[id(master.parameter)], data, (master.group.rank() - owner) % master.group.size())
    _report_within_the_process()
    dist_checkpointing.save({**shards, "steps": steps}, str(folder))


def load_role(chunks: list[torch.nn.Module], optimizer: Optimizer, folder: Path) -> None:
    """Collective: weights, moments and the number of updates, from which the learning rate follows.

    Each rank needs 12 bytes of host memory for every parameter it holds.
    """
    common = dist_checkpointing.load_common_state_dict(str(folder))
    steps, moments = common["steps"], MOMENTS if common["steps"] else ()
    masters, sharded = master_weights(chunks, optimizer.megatron), _sharded_parameters(chunks)
    shards = _shards_of_buffers(chunks)
    for master in masters:
        for name in (WEIGHT, *moments):
            _add(shards, name, sharded[id(master.parameter)], torch.zeros(master.parameter.shape), master.group.rank())
    state = dist_checkpointing.load(shards, str(folder))
    for number, chunk in enumerate(unwrap_model(chunks)):
        chunk.load_state_dict(state[WEIGHT][str(number)])
    for master in masters:
        _, place, name = sharded[id(master.parameter)]
        if master.piece is not None:
            loaded = {moment: state[moment][place][name] for moment in moments}
            master.piece.fill(state[WEIGHT][place][name], loaded)
    optimizer.set_steps(steps)


def _report_within_the_process() -> None:
    """Give Megatron's writer a queue for what it has written.

    Otherwise it starts a process for one on each rank, which saves in the background would need: one that imports the
    main module anew, takes seconds, and lives on when a run is killed.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = Queue()


Located = tuple[ShardedTensor | ShardedTensorFactory, str, str]
"""How Megatron cuts something of a chunk, the number of the chunk, the name in it."""


def _sharded(chunks: list[torch.nn.Module]) -> list[Located]:
    """Everything that the chunks' own state consists of."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    with virtual_pipeline(get_model_config(chunks[0]).virtual_pipeline_model_parallel_size):
        return [
            (sharded, str(number), name)
            for number, chunk in enumerate(unwrap_model(chunks))
            for name, sharded in chunk.sharded_state_dict(metadata=metadata).items()
        ]


def _sharded_parameters(chunks: list[torch.nn.Module]) -> dict[int, Located]:
    """By identity of the parameter."""
    return {id(located[0].data): located for located in _sharded(chunks) if _is_parameter(located[0])}


def _shards_of_buffers(chunks: list[torch.nn.Module]) -> Shards:
    """What the chunks hold besides parameters, as Megatron saves it, beside the weights that are still to come."""
    shards: Shards = {WEIGHT: {str(number): {} for number in range(len(chunks))}}
    for sharded, place, name in _sharded(chunks):
        if not _is_parameter(sharded):
            shards[WEIGHT][place][name] = sharded
    return shards


def _is_parameter(sharded: ShardedBase) -> bool:
    return isinstance(sharded.data, torch.nn.Parameter)


def _add(shards: Shards, kind: str, located: Located, data: Tensor, replica: int) -> None:
    """Let `data` be cut as the parameter is. Of the replicas, number 0 is written."""
    sharded, place, name = located
    changed: dict[str, Any] = {"data": data, "replica_id": (*sharded.replica_id[:-1], replica)}
    if kind != WEIGHT:
        changed["key"] = f"optimizer.state.{kind}.{sharded.key}"
    if isinstance(sharded, ShardedTensor):
        changed["dtype"] = data.dtype
    shards.setdefault(kind, {}).setdefault(place, {})[name] = replace(sharded, **changed)
