"""A covering subset of the matrix: `python -m tests.invariance` runs the whole."""

import pytest

from tests.invariance.__main__ import LIMIT
from tests.invariance.matrix import CUTS, LOSSES, MODES, covering_cases
from tests.invariance.suite import run_cases

pytestmark = pytest.mark.distributed

LAYOUTS = ("tp2-sp", "pp2-vpp2", "cp2", "dp2", "ep2-dp2", "tp2-sp-cp2", "pp2-vpp2-dp2")
CASES = covering_cases(LAYOUTS, LOSSES, MODES, list(CUTS))
BF16_LIMIT = 0.02
"""bf16 against float32 on one process: weights and activations round at 0.4%. Measured over four layouts: 0.0125."""
BF16_CASES = covering_cases(["tp2-sp", "cp2"], LOSSES, MODES, list(CUTS))


@pytest.fixture(scope="module")
def results():
    return {result.case: result for result in run_cases(CASES)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_losses_and_metrics_are_those_of_one_process(results, case):
    assert results[case].worst <= LIMIT, results[case].errors


def test_the_subset_covers_every_loss_with_every_mode_and_every_cut():
    assert {(case.loss, case.mode) for case in CASES} == {(loss, mode) for loss in LOSSES for mode in MODES}
    assert {(case.loss, case.cut) for case in CASES} == {(loss, cut) for loss in LOSSES for cut in CUTS}


@pytest.fixture(scope="module")
def results_in_bf16():
    return {result.case: result for result in run_cases(BF16_CASES, dtype="bfloat16")}


@pytest.mark.parametrize("case", BF16_CASES, ids=lambda case: case.name)
def test_bf16_stays_near_float32(results_in_bf16, case):
    assert results_in_bf16[case].worst <= BF16_LIMIT, results_in_bf16[case].errors
