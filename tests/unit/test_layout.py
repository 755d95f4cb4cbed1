"""Parallel sizes that do not fit the model or the processes: what the error says to use instead."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from mppo.config import ParallelConfig, RecomputeConfig
from mppo.errors import ConfigError
from mppo.megatron.model import transformer_config
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import check_layout, data_parallel_size
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
        (DENSE, cut(pp=3), "the nearest number of stages that does is 2"),
    ],
)
def test_a_layout_that_the_model_has_no_place_in(model, parallel, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(parallel, model)


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
        (replace(DENSE, num_layers=6), cut(pp=4), "does not divide the critic's 6 layers"),
        (replace(DENSE, num_attention_heads=3), cut(tp=2), "does not divide the critic's 3 attention heads; use 1"),
    ],
)
def test_a_layout_that_the_critic_has_no_place_in(critic, parallel, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(parallel, DENSE, (parallel, critic))


def test_stages_that_only_the_critic_has():
    own = cut(pp=2, vpp=3)
    check_layout(cut(pp=2), DENSE, (own, replace(DENSE, num_layers=6)))
    with pytest.raises(ConfigError, match="x critic.parallel.virtual_pipeline_model_parallel_size=3 does not divide"):
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
