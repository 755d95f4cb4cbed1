"""The estimate of `mppo plan` counts what transformers counts, and grows and shrinks as layouts say."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from mppo.cli.main import main
from mppo.config import OptimConfig, ParallelConfig, RecomputeConfig
from mppo.trainer.estimate import Layout, Load, estimate, stage_weights
from mppo.weights.architectures import architecture_of
from tests.distributed.model_folders import CONFIGS, REWARD_MODELS

pytestmark = pytest.mark.unit

MODELS = [name for name in CONFIGS if name not in REWARD_MODELS]
LOAD = Load(tokens=1000, actions=800, micro_batches=8)


def model_config(name):
    hf = CONFIGS[name]
    return architecture_of(hf).model_config(hf, make_vocab_size_divisible_by=1)


def layout(dtype="float32", dp=1, optim=None, recompute=None, **parallel):
    return Layout.of(ParallelConfig(**parallel), dp, dtype, optim or OptimConfig(), recompute or RecomputeConfig())


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_every_parameter(name):
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(CONFIGS[name]).parameters()
    assert stage_weights(model_config(name), tp=1, pp=1, stage=0) == sum(p.numel() for p in parameters)


def test_stages_and_shards_together_hold_every_parameter_and_the_norms_on_each_rank():
    model = model_config("llama")
    whole = stage_weights(model, 1, 1, 0)
    replicated = model.num_layers * 2 * model.hidden_size + model.hidden_size
    parts = [stage_weights(model, 2, 2, stage) for stage in (0, 1)]
    assert 2 * sum(parts) - replicated == whole


def test_adam_and_gradients_in_bytes():
    model = model_config("llama")
    weights = stage_weights(model, 1, 1, 0)
    full, half = (estimate(model, layout(dtype), LOAD) for dtype in ("float32", "bfloat16"))
    assert (full.weights, full.gradients, full.optimizer) == (4 * weights, 4 * weights, 8 * weights)
    assert (half.weights, half.gradients, half.optimizer) == (2 * weights, 4 * weights, 12 * weights)
    spread = estimate(model, layout(dp=4, optim=OptimConfig(use_distributed_optimizer=True)), LOAD)
    assert spread.optimizer == 2 * weights


def test_one_rank_sends_nothing():
    alone = estimate(model_config("llama"), layout(), LOAD)
    assert not any(count for name, count in vars(alone).items() if name.startswith("sent"))


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"tensor_model_parallel_size": 2}, "sent_tensor_parallel"),
        ({"pipeline_model_parallel_size": 2}, "sent_pipeline"),
        ({"context_parallel_size": 2}, "sent_context"),
    ],
)
def test_each_kind_of_parallelism_sends_its_own(parallel, name):
    assert getattr(estimate(model_config("llama"), layout(**parallel), LOAD), name) > 0


def test_recomputation_keeps_less_and_more_tokens_keep_more():
    model = model_config("llama")
    kept = estimate(model, layout(), LOAD).activations
    assert estimate(model, layout(recompute=RecomputeConfig(granularity="full")), LOAD).activations < kept / 4
    assert estimate(model, layout(), replace(LOAD, tokens=2000)).activations == 2 * kept


def test_the_command_estimates_where_a_model_is_given(capsys):
    assert main(["plan", "--json", "--config-name", "class", "--world-size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["weights"] > 0
    assert found["sent_tensor_parallel"] > 0
    assert main(["plan", "--json", "actor.ppo_micro_batch_size_per_gpu=1"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"] is None
