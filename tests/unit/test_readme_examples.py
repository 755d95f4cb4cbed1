"""The Python examples in the READMEs of the rooms run, and what they register works."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import mppo
from mppo.algorithm.advantages import ESTIMATORS
from mppo.algorithm.kl import KL_FORMS, kl_penalty
from mppo.algorithm.policy_losses import POLICY_LOSSES, policy_loss
from mppo.algorithm.rollout_correction import REJECTIONS, CorrectionInputs, correct, rollout_correction_config
from mppo.check_loss.examination import examine
from tests.unit.advantage_cases import estimate, outcomes
from tests.unit.samples import segments_of

pytestmark = pytest.mark.unit

PACKAGE = Path(mppo.__file__).parent


@pytest.fixture
def run_examples(tmp_path, monkeypatch):
    """Imports the examples of a room's README as the module `examples_of_<room>`; what they register is forgotten."""
    for registry in (POLICY_LOSSES, ESTIMATORS, KL_FORMS, REJECTIONS):
        monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    monkeypatch.syspath_prepend(tmp_path)

    def run(room: str) -> None:
        blocks = re.findall(r"^```python\n(.*?)^```$", (PACKAGE / room / "README.md").read_text(), re.S | re.M)
        assert blocks
        (tmp_path / f"examples_of_{room}.py").write_text("\n".join(blocks))
        importlib.import_module(f"examples_of_{room}")

    return run


def test_the_examples_of_the_algorithm_room(run_examples):
    run_examples("algorithm")
    assert [f for f in examine(policy_loss("bold", {"share": 0.2})) if not f.passed] == []
    assert examine(policy_loss("examples_of_algorithm:bold"))[0].passed
    assert estimate("signs", outcomes([1.0, 3.0, 2.0, 2.0], [0, 0, 1, 1])).advantages.tolist() == [-1, 1, 0, 0]
    d = torch.tensor([0.0, 3.0**0.5, -(3.0**0.5)])
    assert kl_penalty(d, torch.zeros(3), "root").tolist() == pytest.approx([0, 1, 1])
    mask = torch.ones(3, dtype=torch.bool)
    x = CorrectionInputs(torch.tensor([0.3, -0.3, 0.1]), torch.zeros(3), mask, segments_of(2, 1))
    config = rollout_correction_config({"rollout_rs": "seq_sum_abs", "rollout_rs_threshold": 0.5})
    assert correct(x, config).kept.tolist() == [False, False, True]


def test_the_examples_of_the_check_loss_room(run_examples):
    run_examples("check_loss")
