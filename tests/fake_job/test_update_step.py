"""A rank's update step in a job of 64 GPUs: no waits inside it, nothing elsewhere than on them, memory as estimated."""

import pytest

from mppo.config import OptimConfig, RecomputeConfig
from mppo.planning.estimate.lengths import Load
from mppo.planning.estimate.memory import HeadTerms, held_by
from mppo.planning.estimate.stage_layout import Layout
from tests.fake_job.cases import CASES, LENGTHS, MICRO_BATCHES, PP, PROMPT, WORLD

pytestmark = pytest.mark.distributed

BEFORE_THE_STEP = "_local_scalar_dense in clip_grads.py:get_grad_norm_fp32"
AFTER_THE_STEP = "_to_copy in statistics.py:reduced < collectives.py:reduce_statistics < roles.py:update"
DISPATCHER = ("token_dispatcher.py:_maybe_dtoh_and_synchronize", "moe_utils.py:permute < token_dispatcher.py")
"""Of a mixture of experts Megatron's dispatcher reads the sizes of what it sends, and without Transformer Engine's
fused permutation the number of rows."""
ACTIVATIONS = 0.05
"""Relative."""


@pytest.fixture(scope="module")
def found(run_on_pretended_gpu) -> dict[str, dict]:
    """Of all cases, by one process."""
    return run_on_pretended_gpu("update_step", *CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_before_the_step_and_once_after_it(found, name):
    waits = [wait for wait in found[name]["waits"] if not any(part in wait for part in DISPATCHER)]
    assert waits[0].startswith(BEFORE_THE_STEP)
    assert waits[1:] == [AFTER_THE_STEP] * (CASES[name].stage == PP - 1)
    others = len(found[name]["waits"]) - len(waits)
    assert (others > 0) == (CASES[name].model.num_experts is not None)


@pytest.mark.parametrize("name", CASES)
def test_everything_is_on_the_device(found, name):
    assert found[name]["strays"] == []


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_what_the_estimate_says(found, name):
    case = CASES[name]
    dp = WORLD // case.parallel.model_parallel_size
    layout = Layout.of(case.parallel, dp, "bfloat16", OptimConfig(use_distributed_optimizer=True), RecomputeConfig())
    tokens, actions = sum(LENGTHS), sum(LENGTHS) - len(LENGTHS) * PROMPT
    load = Load(tokens, actions, MICRO_BATCHES, MICRO_BATCHES * tokens, MICRO_BATCHES * actions)
    held = held_by(case.model, layout, load, case.stage, HeadTerms())
    exact = {part: getattr(held, part) for part in ("weights", "gradients", "optimizer")}
    assert exact == {part: found[name][part] for part in exact}
    assert held.activations == pytest.approx(found[name]["activations"], rel=ACTIVATIONS)
