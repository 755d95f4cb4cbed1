"""Which rank of a Megatron-core job holds what, from its parallel sizes alone."""

import torch

from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Sizes
from mppo.weights.architectures import TIED_OUTPUT, Parameter
from mppo.weights.shards import Shard, hf_tensors, holding
from mppo.weights.transfer_plan import Layout

Stages = tuple[tuple[tuple[int, ...], ...], ...]
"""`stages[pp_rank][chunk]`: the layers of a model chunk, by their numbers in the whole model."""


def even_stages(num_layers: int, pp: int, vpp: int | None) -> Stages:
    """As many layers in every chunk; the chunks of a virtual pipeline go round over the stages."""
    chunks = vpp or 1
    size = num_layers // (pp * chunks)

    def layers(stage: int, chunk: int) -> tuple[int, ...]:
        start = (chunk * pp + stage) * size
        return tuple(range(start, start + size))

    return tuple(tuple(layers(stage, chunk) for chunk in range(chunks)) for stage in range(pp))


def shard_of(rank: int, sizes: Sizes, stages: Stages, num_experts: int | None) -> Shard:
    """Megatron-core counts tensor-, context-, data- and pipeline-parallel ranks, the fastest first; within a stage,
    for experts, expert-tensor-, expert- and expert-data-parallel ones (`parallel_state.RankGenerator`)."""
    stage, place = divmod(rank, sizes.tp * sizes.cp * sizes.dp)
    experts = (num_experts or 0) // sizes.ep
    first_expert = place // sizes.etp % sizes.ep * experts
    return Shard(
        layers=tuple(layer for chunk in stages[stage] for layer in chunk),
        first=stage == 0,
        last=stage == len(stages) - 1,
        tp_rank=place % sizes.tp,
        tp=sizes.tp,
        etp_rank=place % sizes.etp,
        etp=sizes.etp,
        experts=tuple(range(first_expert, first_expert + experts)),
    )


def megatron_layout(
    rows: tuple[Parameter, ...], model: ModelConfig, sizes: Sizes, stages: Stages, dtype: torch.dtype
) -> Layout:
    """What every rank of the world holds. Ranks that hold the same share one Holding.

    The name of a parameter is that in Megatron's local layers, with numbers of layers and experts in the whole model.
    A tied output layer is a parameter of its own where it is not on the stage of the embedding.
    """
    made = {}

    def of(shard: Shard):
        if shard not in made:
            present = tuple(row for row in rows if not (row == TIED_OUTPUT and shard.first))
            made[shard] = holding(shard, present, model)
        return made[shard]

    world = sizes.tp * sizes.cp * sizes.dp * sizes.pp
    return Layout(
        hf_tensors(rows, model, dtype),
        {rank: of(shard_of(rank, sizes, stages, model.num_experts)) for rank in range(world)},
    )
