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


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.double)


def close(actual, expected, rtol, atol):
    torch.testing.assert_close(tensor(actual), tensor(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_reference_agrees(case):
    result, expected = evaluate(case), dict(case["expect"])
    assert expected.keys() <= result.keys()

    metrics = expected.pop("metrics", {})
    assert metrics.keys() <= result.get("metrics", {}).keys()
    for name, value in metrics.items():
        close(result["metrics"][name], value, rtol=1e-6, atol=1e-9)
    real = tensor(case["inputs"]["response_mask"]) if case["kind"] == "advantage" else torch.ones(())
    for name, values in expected.items():
        if values is None:
            assert result[name] is None, name
        else:
            close((tensor(result[name]) * real).tolist(), (tensor(values) * real).tolist(), rtol=1e-7, atol=1e-9)


def test_no_case_is_lost():
    assert Counter(case["kind"] for case in CASES) == ALL
