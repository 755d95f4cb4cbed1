"""The hook against a dense single-process reference: transformers' model, padded batches, autograd."""

import pytest

from tests.distributed.hook_cases import CASES, Case
from tests.distributed.hook_worker import measure_cases
from tests.distributed.model_folders import REWARD_MODELS, write_all
from tests.distributed.ranks import call_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.quick]

LIMIT = 1e-6
"""Of the largest entry: of the outputs, or of the gradient of the whole model."""
LIMIT_BY_TENSOR = 3e-6
"""Of the largest entry of the gradient of the parameter itself, which may be small: float32 rounds at 6e-8."""

GRADIENTS = {"gradient", "gradient_by_tensor", "grad_norm"}
ACTOR = {"log_probs", "entropy", "pg_loss", "kl_loss", "entropy_loss", "loss"} | GRADIENTS
CRITIC = {"values", "vf_loss"} | GRADIENTS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def measure(models):
    """A function: the errors of every case of one number of processes, by one start for all of them."""
    launched = {}

    def measured(processes: int) -> dict[str, dict[str, float]]:
        if processes not in launched:
            launched[processes] = {}  # a start that fails is not tried again for each of its cases
            launched[processes] = call_on_ranks(measure_cases, processes, models)[0]
        return launched[processes]

    return measured


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hook_equals_the_dense_reference(measure, case: Case):
    errors = measure(case.processes)[case.name]
    expected = CRITIC if case.model in REWARD_MODELS else ACTOR
    assert set(errors) == expected | ({"balance_loss"} if case.aux_loss_coeff else set())
    limits = {name: LIMIT_BY_TENSOR if name == "gradient_by_tensor" else LIMIT for name in errors}
    too_large = {name: error for name, error in errors.items() if not error < limits[name]}
    assert not too_large
