"""The Python examples in the READMEs of the rooms run, and what they register works."""

import asyncio
import importlib
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mppo
from mppo.algorithm.advantages import ESTIMATORS
from mppo.algorithm.aggregation import AGGREGATIONS, BatchCounts, token_weights
from mppo.algorithm.kl import KL_FORMS, kl_penalty
from mppo.algorithm.policy_losses import POLICY_LOSSES, policy_loss
from mppo.algorithm.rollout_correction import REJECTIONS, CorrectionInputs, correct, rollout_correction_config
from mppo.algorithm.rollout_correction.plugins import IMPORTANCE_WEIGHTS
from mppo.batch.trajectory import TrajectoryId
from mppo.check_loss.examination import examine
from mppo.rollout.agents.session import Session
from mppo.rollout.engines.contract import ENGINES, SamplingParams
from mppo.rollout.prompts import Prompt
from mppo.rollout.reward_calls import call
from mppo.rollout.rewards import Sample
from mppo.rollout.tasks import GENERATORS, REWARDS, reward_function
from mppo.weights.presets import PRESETS
from tests.unit.advantage_cases import estimate, outcomes
from tests.unit.engines import own_weights, small_engine, update
from tests.unit.samples import segments_of

pytestmark = pytest.mark.unit

PACKAGE = Path(mppo.__file__).parent
REGISTRIES = (
    POLICY_LOSSES,
    ESTIMATORS,
    KL_FORMS,
    REJECTIONS,
    IMPORTANCE_WEIGHTS,
    AGGREGATIONS,
    REWARDS,
    GENERATORS,
    ENGINES,
    PRESETS,
)


@pytest.fixture
def run_examples(tmp_path, monkeypatch):
    """Imports the examples of a room's README as the module `examples_of_<room>`; what they register is forgotten."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    monkeypatch.syspath_prepend(tmp_path)

    def run(room: str) -> ModuleType:
        (tmp_path / f"examples_of_{room}.py").write_text("\n".join(examples(room)))
        return importlib.import_module(f"examples_of_{room}")

    return run


def examples(room: str) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```$", (PACKAGE / room / "README.md").read_text(), re.S | re.M)
    assert blocks
    return blocks


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
    config = rollout_correction_config({"rollout_is": "mean_of_trajectory"})
    assert correct(x, config).importance_weights.tolist() == pytest.approx([1.0, 1.0, math.exp(0.1)])
    weights = token_weights("root-length", mask, segments_of(2, 1), BatchCounts(3, 2), norm=1.0)
    assert weights.tolist() == pytest.approx([0.5 / 2**0.5, 0.5 / 2**0.5, 0.5])


@pytest.mark.parametrize("room", ["batch", "check_loss", "config"])
def test_examples_that_check_themselves(run_examples, room):
    run_examples(room)


def test_the_examples_of_the_rollout_room(run_examples):
    module = run_examples("rollout")
    mask = (False, True, True)
    group = [Sample("a", "12", "12", {}, (1, 2, 3), mask), Sample("a", "1", "12", {}, (1, 2, 3), (False, False, True))]

    def scores(name: str) -> list[float]:
        return [outcome.score for outcome in call(reward_function(name, {}), group).outcomes]

    assert scores("examples_of_rollout:short") == [1.0, 1.0]
    assert scores("tidy") == pytest.approx([1 + 0.1 / 3, 0.1 / 2])
    assert scores("longest") == [1.0, 0.0]
    assert reward_function("examples_of_rollout:asked", {}).is_async
    assert GENERATORS.get("counting").bind({"size": 1}, "options")() == [{"prompt": "0,", "ground_truth": "1"}]

    assert isinstance(ENGINES.get("parrot").fn(None, None), module.Parrot)
    engine = small_engine()
    update(engine, own_weights(engine), 3)
    session = Session(engine, TrajectoryId(7, 1), SamplingParams(max_new_tokens=2, ignore_eos=True), 0, 60.0)
    first, second = asyncio.run(module.ask_again(Prompt("12", (1, 2), None), session))
    assert (first.uid, second.uid) == (TrajectoryId(7, 1), TrajectoryId(7, 1, part=1))
    assert second.token_ids[:4].tolist() == first.token_ids.tolist()
    assert second.action_mask.tolist() == [False] * 4 + [True] * 2
    second.validate(vocab_size=66)


def test_the_preset_of_the_weights_room(run_examples):
    run_examples("weights")
    assert PRESETS.get("narrow").fn({"num_hidden_layers": 3})[0].hidden_size == 32


def test_every_registry_has_an_example():
    shown = "".join("".join(examples(room)) for room in ("algorithm", "rollout", "weights"))
    names = {name for name in vars(sys.modules[__name__]) if name.isupper() and globals()[name] in REGISTRIES}
    assert len(names) == len(REGISTRIES)
    assert {name for name in names if f"@{name}.register(" not in shown} == set()


def test_the_hook_alone_is_that_of_the_script_that_a_test_runs():
    script = (PACKAGE.parent / "tests/distributed/plain_megatron.py").read_text().splitlines()
    (lines,) = (block.splitlines() for block in examples("megatron"))
    assert [line for line in lines if line and line not in script] == []
