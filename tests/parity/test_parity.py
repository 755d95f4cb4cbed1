"""mppo against numbers that the reference implementation (verl 0.9.1) gave, in float64."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.parity.adapter import evaluate

pytestmark = pytest.mark.unit

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]
ALL = {
    "policy_loss": 109,
    "aggregate": 5,
    "advantage": 22,
    "kl": 11,
    "kl_controller": 2,
    "value_loss": 10,
    "rollout_correction": 10,
    "actor_loss": 3,
}
IMPLEMENTED = {
    "policy_loss": 6,  # vanilla without importance weights
    "aggregate": 5,
    "advantage": 6,  # gae, grpo, reinforce_plus_plus
    "kl": 11,
    "kl_controller": 2,
    "value_loss": 10,
    "actor_loss": 3,
}
"""How many cases run: raise a number when what was missing is there."""


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.double)


def close(actual, expected, rtol, atol):
    torch.testing.assert_close(tensor(actual), tensor(expected), rtol=rtol, atol=atol)


def is_implemented(case):
    try:
        evaluate(case)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_reference_agrees(case):
    try:
        result = evaluate(case)
    except NotImplementedError as missing:
        pytest.skip(f"not implemented: {missing}")
    expected = dict(case["expect"])
    assert result.keys() == expected.keys()

    metrics = expected.pop("metrics", {})
    assert metrics.keys() <= result.get("metrics", {}).keys()
    for name, value in metrics.items():
        close(result["metrics"][name], value, rtol=1e-6, atol=1e-9)
    for name, values in expected.items():
        real = tensor(case["inputs"]["response_mask"]) if case["kind"] == "advantage" else torch.ones(())
        close((tensor(result[name]) * real).tolist(), (tensor(values) * real).tolist(), rtol=1e-7, atol=1e-9)


def test_no_case_is_lost():
    assert Counter(case["kind"] for case in CASES) == ALL


def test_every_case_of_what_is_implemented_runs():
    assert Counter(case["kind"] for case in CASES if is_implemented(case)) == IMPLEMENTED
