"""Which decoder layers each pipeline stage holds: as many as its neighbours, or what the configuration says."""

from mppo.config import ParallelConfig
from mppo.errors import ConfigError
from mppo.megatron.model_config import ModelConfig


def layers_of_stages(
    model: ModelConfig, parallel: ParallelConfig, role: str = "model", field: str = "parallel"
) -> list[list[list[int]]]:
    """`[stage][chunk]` -> numbers of its decoder layers, from 0; every chunk holds at least one.

    Stages run one after another, chunk by chunk: the first chunk of every stage, then the second of every stage, ...
    Numbers of layers differ by at most one between stages whose number is not given, and between chunks of a stage.
    What is left over goes to late stages, which keep fewer micro-batches in flight (1F1B), to the last one last, for it
    has the output layer; within a stage to late chunks, in the last stage to early ones.
    Raises ConfigError, naming `role` and the `field` of its layout, where there are too few layers.
    """
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    sizes = [
        _evenly(count, _late_first(chunks) if stage < pp - 1 else list(range(chunks)))
        for stage, count in enumerate(_layers_per_stage(model.num_layers, parallel, role, field))
    ]
    layers: list[list[list[int]]] = [[[] for _ in range(chunks)] for _ in range(pp)]
    start = 0
    for chunk in range(chunks):
        for stage in range(pp):
            layers[stage][chunk] = list(range(start, start + sizes[stage][chunk]))
            start += sizes[stage][chunk]
    return layers


def _layers_per_stage(num_layers: int, parallel: ParallelConfig, role: str, field: str) -> list[int]:
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    given = {stage: count for stage, count in ((0, first), (pp - 1, last)) if count is not None}
    for name, count in (("first", first), ("last", last)):
        if count is not None and count < chunks:
            raise ConfigError(
                f"{field}.num_layers_in_{name}_pipeline_stage={count} is fewer than the {chunks} model chunks of a"
                f" stage ({field}.virtual_pipeline_model_parallel_size); raise it to {chunks} or more"
            )
    others = [stage for stage in [*_late_first(pp - 1), pp - 1] if stage not in given]
    left = num_layers - sum(given.values())
    if not others and left:
        raise ConfigError(
            f"{field}.num_layers_in_first_pipeline_stage={first} and num_layers_in_last_pipeline_stage={last} make"
            f" {sum(given.values())} layers on two stages, but the {role} has {num_layers}; unset one of them"
        )
    if left < len(others) * chunks:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={pp} x {field}.virtual_pipeline_model_parallel_size={chunks} makes"
            f" {len(others) * chunks} model chunks{' besides the stages whose layers are given' * bool(given)}, more"
            f" than the {left} of the {role}'s {num_layers} layers that they share; lower one of them"
        )
    spread = dict(zip(others, _in_turn(left, len(others)), strict=True)) if others else {}
    return [(given | spread)[stage] for stage in range(pp)]


def _late_first(count: int) -> list[int]:
    return list(reversed(range(count)))


def _in_turn(total: int, count: int) -> list[int]:
    """`total` in `count` numbers that differ by at most one, the larger ones first."""
    return [total // count + (i < total % count) for i in range(count)]


def _evenly(total: int, order: list[int]) -> list[int]:
    """`total` over the places that `order` names, those it names first getting what is left over."""
    shares = dict(zip(order, _in_turn(total, len(order)), strict=True))
    return [shares[place] for place in range(len(order))]


def megatron_layout(model: ModelConfig, parallel: ParallelConfig) -> list[list[str]]:
    """The same for Megatron-core's `pipeline_model_parallel_layout`: the layers of each model chunk, as chunks run."""
    layers = layers_of_stages(model, parallel)
    layout = [["decoder"] * len(stage[chunk]) for chunk in range(len(layers[0])) for stage in layers]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout
