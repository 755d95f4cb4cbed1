"""Parallel sizes that do not fit the model or the processes: what the error says to use instead."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3MoeConfig

from mppo.config import ParallelConfig, RecomputeConfig
from mppo.errors import ConfigError
from mppo.megatron.model import transformer_config
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.stage_layers import layers_of_stages
from mppo.megatron.topology import check_layout, data_parallel_size, virtual_pipeline
from mppo.weights.architectures import architecture_of
from tests.distributed.model_folders import COMMON

pytestmark = pytest.mark.unit


def sized(hf) -> ModelConfig:
    return architecture_of(hf).model_config(hf)


DENSE = sized(Qwen3Config(**COMMON))
EXPERTS = sized(Qwen3MoeConfig(**COMMON, num_experts=6, moe_intermediate_size=24, num_experts_per_tok=2))


def cut(**sizes) -> ParallelConfig:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
    names |= {"cp": "context_parallel_size", "ep": "expert_model_parallel_size", "sp": "sequence_parallel"}
    names |= {"vpp": "virtual_pipeline_model_parallel_size"}
    return ParallelConfig(**{names[name]: size for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        (DENSE, cut(ep=2), "expert_model_parallel_size=2: the model is dense; use 1"),
        (EXPERTS, cut(ep=4), "expert_model_parallel_size=4 does not divide the model's 6 experts; use 3"),
        (EXPERTS, cut(tp=2), "set parallel.sequence_parallel=true"),
        (EXPERTS, cut(tp=4, sp=True), "does not divide the model's 2 key/value heads; use 2"),
        (DENSE, cut(pp=5), "makes 5 model chunks, more than the 4 of the model's 4 layers that they share"),
    ],
)
def test_a_layout_that_the_model_has_no_place_in(model, parallel, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(parallel, model)


@st.composite
def pipelines(draw):
    """A pipeline and a number of layers that it has places for."""
    pp, vpp = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    counts = st.one_of(st.none(), st.integers(vpp, 9))
    first, last = draw(counts), draw(counts)
    others = pp - (first is not None) - (last is not None)
    left = draw(st.integers(others * vpp, 40)) if others else 0
    layers = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    return ParallelConfig(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp, **layers), left + (
        first or 0
    ) + (last or 0)


@given(pipelines())
def test_layers_are_spread_evenly_over_stages_and_chunks_in_the_order_they_run_in(pipeline):
    parallel, num_layers = pipeline
    layers = layers_of_stages(replace(DENSE, num_layers=num_layers), parallel)
    in_order = [layer for chunk in range(len(layers[0])) for stage in layers for layer in stage[chunk]]
    assert in_order == list(range(num_layers))
    assert all(len(chunk) > 0 for stage in layers for chunk in stage)
    per_stage = [sum(map(len, stage)) for stage in layers]
    given = {
        0: parallel.num_layers_in_first_pipeline_stage,
        len(layers) - 1: parallel.num_layers_in_last_pipeline_stage,
    }
    assert all(count in (None, per_stage[stage]) for stage, count in given.items())
    free = [count for stage, count in enumerate(per_stage) if given.get(stage) is None]
    assert not free or max(free) - min(free) <= 1
    assert all(max(map(len, stage)) - min(map(len, stage)) <= 1 for stage in layers)


@settings(max_examples=20, deadline=None)
@given(pipelines())
def test_megatron_core_builds_the_same_layers(pipeline):
    parallel, num_layers = pipeline
    model = replace(DENSE, num_layers=num_layers)
    layout = transformer_config(model, parallel, torch.float32).pipeline_model_parallel_layout
    with virtual_pipeline(parallel.virtual_pipeline_model_parallel_size):
        for stage, chunks in enumerate(layers_of_stages(model, parallel)):
            assert chunks == [layout.get_layer_id_list(vp_stage=v, pp_rank=stage) for v in range(len(chunks))]


def test_what_is_left_over_goes_to_late_stages_but_to_the_last_one_last():
    def per_stage(num_layers, **sizes):
        return [
            [len(c) for c in stage] for stage in layers_of_stages(replace(DENSE, num_layers=num_layers), cut(**sizes))
        ]

    assert per_stage(94, pp=4) == [[23], [24], [24], [23]]
    assert per_stage(94, pp=8) == [[11], *[[12]] * 6, [11]]
    assert per_stage(5, pp=2, vpp=2) == [[1, 2], [1, 1]]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"first": 3, "last": 2}, "make 5 layers on two stages, but the model has 4"),
        ({"first": 4}, "makes 1 model chunks besides the stages whose layers are given, more than the 0"),
    ],
)
def test_given_numbers_of_layers_that_do_not_add_up(layers, said):
    named = {f"num_layers_in_{stage}_pipeline_stage": count for stage, count in layers.items()}
    with pytest.raises(ConfigError, match=said):
        check_layout(ParallelConfig(pipeline_model_parallel_size=2, **named), DENSE)


def test_norms_are_recomputed_by_transformer_engine_only():
    norms = RecomputeConfig(granularity="selective", modules=["layernorm"])
    with pytest.raises(ConfigError, match="recompute.modules: layernorm"):
        transformer_config(DENSE, cut(), torch.float32, norms)


@pytest.mark.parametrize("parallel", [cut(), cut(ep=3), cut(ep=6), cut(tp=2, sp=True, ep=2), cut(cp=2, ep=2)])
def test_layouts_of_a_mixture_of_experts(parallel):
    check_layout(parallel, EXPERTS)


@pytest.mark.parametrize(
    ("critic", "parallel", "said"),
    [
        (EXPERTS, cut(tp=2), "set critic.parallel.sequence_parallel=true"),
        (EXPERTS, cut(ep=4), "does not divide the critic's 6 experts; use 3"),
        (DENSE, cut(ep=2), "actor and critic are dense; use 1"),
        (replace(DENSE, num_layers=3), cut(pp=4), "more than the 3 of the critic's 3 layers"),
        (replace(DENSE, num_attention_heads=3), cut(tp=2), "does not divide the critic's 3 attention heads; use 1"),
    ],
)
def test_a_layout_that_the_critic_has_no_place_in(critic, parallel, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(parallel, DENSE, (parallel, critic))


def test_stages_that_only_the_critic_has():
    own = cut(pp=2, vpp=3)
    check_layout(cut(pp=2), DENSE, (own, replace(DENSE, num_layers=6)))
    with pytest.raises(ConfigError, match="x critic.parallel.virtual_pipeline_model_parallel_size=3 makes 6 model"):
        check_layout(cut(pp=2), DENSE, (own, DENSE))


@pytest.mark.parametrize(("actor", "critic"), [(DENSE, EXPERTS), (EXPERTS, DENSE)])
def test_one_role_with_experts_is_enough_for_expert_parallelism(actor, critic):
    check_layout(cut(ep=2), actor, (cut(ep=2), critic))


@pytest.mark.parametrize(
    ("parallel", "processes", "found"),
    [(cut(ep=4), 4, 4), (cut(tp=2, sp=True, ep=4), 4, 2), (cut(cp=2, ep=4), 4, 2), (cut(pp=2, ep=2), 4, 2)],
)
def test_experts_are_dealt_out_to_all_ranks_of_a_stage(parallel, processes, found):
    assert data_parallel_size(parallel, processes) == found


def test_experts_over_more_ranks_than_a_stage_has():
    with pytest.raises(ConfigError, match="size=4 does not divide TP x CP x DP = 2, the 4 processes over PP 2; use 2"):
        data_parallel_size(cut(pp=2, ep=4), 4)
