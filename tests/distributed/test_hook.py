"""The hook against a dense single-process reference: transformers' model, padded batches, autograd."""

import pytest
from hook_cases import CASES, Case
from launch import torchrun_results
from model_folders import REWARD_MODELS, write_all

pytestmark = pytest.mark.distributed

LIMIT = 1e-6
"""Of the largest entry: of the outputs, or of the gradient of the whole model."""
LIMIT_BY_TENSOR = 3e-6
"""Of the largest entry of the gradient of the parameter itself, which may be small: float32 rounds at 6e-8."""

ACTOR = {"log_probs", "entropy", "pg_loss", "kl_loss", "entropy_loss", "loss", "gradient", "gradient_by_tensor"}
CRITIC = {"values", "vf_loss", "gradient", "gradient_by_tensor"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def measured(request, models, tmp_path_factory):
    """The errors of every case of one number of processes: one launch for all of them."""
    results = tmp_path_factory.mktemp("hook") / "errors.json"
    return torchrun_results("hook_worker.py", request.param, results, models)


@pytest.mark.parametrize(
    "measured, case",
    [pytest.param(case.processes, case, id=case.name) for case in CASES],
    indirect=["measured"],
)
def test_hook_equals_the_dense_reference(measured, case: Case):
    errors = measured[case.name]
    assert set(errors) == (CRITIC if case.model in REWARD_MODELS else ACTOR)
    limits = {name: LIMIT_BY_TENSOR if name == "gradient_by_tensor" else LIMIT for name in errors}
    too_large = {name: error for name, error in errors.items() if not error < limits[name]}
    assert not too_large
