"""Megatron-core's configuration: fields that are passed through, and those that mppo decides."""

import pytest
import torch

from mppo.config import ModelSource, ParallelConfig
from mppo.errors import ConfigError
from mppo.megatron.kernels import Fusions, in_use
from mppo.megatron.model import transformer_config
from tests.fake_job.cases import DENSE

pytestmark = pytest.mark.unit


def config(dtype=torch.bfloat16, **passed):
    return transformer_config(DENSE, ParallelConfig(), dtype, passed=passed)


def test_a_field_that_mppo_leaves_alone_is_passed_through():
    assert config(barrier_with_L1_time=False).barrier_with_L1_time is False
    assert config().barrier_with_L1_time is True


def test_a_fusion_can_be_chosen():
    assert config().bias_activation_fusion is False  # without Transformer Engine
    assert config(bias_activation_fusion=True).bias_activation_fusion is True


@pytest.mark.parametrize("name", ["attention_dropout", "calculate_per_token_loss", "num_moe_experts", "num_layers"])
def test_what_mppo_sets_is_refused(name):
    with pytest.raises(ConfigError, match=f"model.megatron.{name}: mppo sets it"):
        config(**{name: 1})


def test_an_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="no such field; did you mean 'bias_activation_fusion'"):
        config(bias_activation_fusio=True)


def test_what_megatron_refuses_is_told():
    with pytest.raises(ConfigError, match="Megatron-core refuses it: CPU offloading"):
        config(cpu_offloading=True, cpu_offloading_num_layers=99)


def test_fp32_logits_of_float32_are_refused():
    with pytest.raises(ConfigError, match="model.fp32_logits has no effect with model.dtype=float32"):
        ModelSource(dtype="float32", fp32_logits=True)


def test_the_start_table_tells_fallbacks():
    """On a machine without a GPU all but the precision is one."""
    rows = {what: (which, instead) for what, which, instead in in_use(config(apply_rope_fusion=False))}
    assert rows["layers"] == ("Megatron's local ones", "Transformer Engine's: there is no GPU")
    assert rows["precision"] == ("bfloat16, fp32 master weights", "")
    assert rows["process groups"] == ("gloo", "NCCL")
    assert rows["fusions"][0] == "none" and "apply_rope" in rows["fusions"][1]
    assert not any(vars(Fusions.of(torch.float32)).values())
