"""`mppo sft`: another objective in the same hook learns, and is the same under every layout."""

from dataclasses import asdict

import pytest

from tests.distributed.ranks import call_on_ranks
from tests.distributed.sft_worker import Trained, supervised_steps
from tests.distributed.train_runs import sft, sft_refused
from tests.invariance.matrix import known_layouts, parallel_config, processes_of

pytestmark = pytest.mark.distributed

FOUR_LAYERS = "model.preset_options={num_hidden_layers: 4}"
PLAIN_STEP = ("actor.optim.adam_eps=1e-2", "actor.optim.lr=1e-2")
"""Adam makes much of gradients that are rounding alone, unless its epsilon is larger."""
COVERING = [name for name in known_layouts() if processes_of(name) <= 4 and "ep" not in name]
"""Every layout of a dense model on two and four processes."""


def layout_overrides(name: str) -> list[str]:
    return [f"parallel.{field}={value}" for field, value in asdict(parallel_config(name)).items() if value is not None]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Trained:
    return call_on_ranks(supervised_steps, 1, [FOUR_LAYERS, *PLAIN_STEP], tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("layout", COVERING)
def test_a_step_is_the_same_under_every_layout(alone, layout, tmp_path):
    overrides = [FOUR_LAYERS, *PLAIN_STEP, *layout_overrides(layout)]
    trained = call_on_ranks(supervised_steps, processes_of(layout), overrides, tmp_path)[0]
    assert alone.losses[1] < alone.losses[0] - 0.1, "the step must change something"
    assert trained.losses == pytest.approx(alone.losses, rel=1e-6)
    assert trained.metrics == pytest.approx(alone.metrics, rel=1e-5)
    largest = max(x.abs().max().item() for x in alone.weights.values())
    assert trained.weights.keys() == alone.weights.keys()
    for name, weight in trained.weights.items():
        assert (weight - alone.weights[name]).abs().max().item() <= 1e-6 * largest, name


def test_sums_are_learned_from_given_answers(tmp_path):
    run = sft("sft", 2, tmp_path, "parallel=pp2")
    losses = run.column("sft/token_loss")
    assert losses[0] > 3.0 and losses[-1] < 0.1
    assert (tmp_path / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout.n=4",), "rollout.n is set but would have no effect"),
        (("actor.entropy_coeff=0.1",), "actor.entropy_coeff is set but would have no effect"),
        (("critic.optim.lr=1e-3",), "critic.optim.lr is set but would have no effect"),
        (("trainer.save_freq=5",), "trainer.save_freq is set but would have no effect"),
        (("data.max_response_length=1",), "over data.max_response_length=1"),
    ],
)
def test_what_supervised_training_cannot_use_is_refused(tmp_path, overrides, said):
    assert said in sft_refused("sft", 2, tmp_path, *overrides)
