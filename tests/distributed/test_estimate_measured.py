"""The estimate of `mppo plan` against what ranks hold and send in one real update, counted to the byte."""

from dataclasses import asdict

import pytest

from mppo.megatron.head import CPU_BLOCK
from mppo.planning.estimate import Estimate, estimate
from mppo.planning.estimate.lengths import Length, load_of
from mppo.planning.estimate.memory import HeadTerms, head_bytes
from mppo.planning.estimate.stage_layout import FP32, Layout
from tests.distributed.estimate_cases import CASES, HEADS, PROMPT, RESPONSE, SETTINGS, TRAJECTORIES, Case, HeadCase
from tests.distributed.estimate_worker import measure_cases
from tests.distributed.ranks import call_on_ranks

pytestmark = pytest.mark.distributed

EXACT = ("weights", "gradients", "optimizer")
ACTIVATIONS = 0.05
"""Relative, as all: the estimate leaves out numbers per token and masks."""
COMMUNICATION = {"experts": 0.03}
"""The estimate takes experts to be equally popular."""
NUMBERS = 1e-3
"""Of all other communication: the estimate leaves out the step's metrics."""
HEAD = 0.01


@pytest.fixture(scope="module")
def measure():
    """A function: what was measured for every case of one number of processes, by one start for all of them."""
    launched = {}

    def measured(processes: int) -> dict:
        if processes not in launched:
            launched[processes] = {}  # a start that fails is not tried again for each of its cases
            launched[processes] = call_on_ranks(measure_cases, processes)[0]
        return launched[processes]

    return measured


def estimated(case: Case) -> Estimate:
    layout = Layout.of(case.parallel, case.data_parallel_size, case.dtype, case.optim, case.recompute)
    load = load_of([Length(PROMPT, RESPONSE)] * TRAJECTORIES, SETTINGS, case.model_config, layout.sizes)
    return estimate(case.model_config, layout, load, HeadTerms())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_estimate_is_what_the_worst_rank_of_each_stage_holds_and_sends(measure, case: Case):
    ranks = measure(case.processes)[case.name]
    for stage in estimated(case).stages:
        of_stage = [rank for rank in ranks if rank["stage"] == stage.stage]
        held = {name: max(rank[name] for rank in of_stage) for name in (*EXACT, "activations")}
        assert {name: getattr(stage.held, name) for name in EXACT} == {name: held[name] for name in EXACT}
        assert stage.held.activations == pytest.approx(held["activations"], rel=ACTIVATIONS)
        for kind, sent in asdict(stage.sent).items():
            worst = max(rank["sent"].get(kind, 0) for rank in of_stage)
            assert sent == pytest.approx(worst, rel=COMMUNICATION.get(kind, NUMBERS)), kind


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
def test_estimate_is_the_peak_of_the_head(measure, case: HeadCase):
    size = 2 if case.dtype == "bfloat16" else FP32
    found = head_bytes(case.width, case.vocabulary, case.tokens, size, case.terms, CPU_BLOCK)
    assert found == pytest.approx(measure(1)["heads"][case.name], rel=HEAD)
