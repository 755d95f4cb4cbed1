"""What the simulated control plane of `mppo plan` counts, and what it refuses."""

import json

import pytest

from mppo.cli.main import main

pytestmark = pytest.mark.unit

BATCH = [
    "--config-name=class",
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=1",
    "data.train_batch_size=32",
    "rollout.n=8",
    "actor.ppo_mini_batch_size=8",
]


def simulated(capsys, ranks: str) -> list[dict]:
    assert main(["plan", "--json", "--world-size=4", f"--control-plane={ranks}", *BATCH]) == 0
    return json.loads(capsys.readouterr().out)["control_plane"]


def test_more_ranks_gather_the_same_summaries_and_receive_less_each(capsys):
    few, many = simulated(capsys, "2,128")
    assert (few["data_parallel"], many["data_parallel"]) == (1, 64)
    assert many["bytes_received"] < few["bytes_received"] / 16
    overhead_of_a_parcel = 500
    assert few["bytes_gathered"] <= many["bytes_gathered"] < few["bytes_gathered"] + 128 * overhead_of_a_parcel


@pytest.mark.parametrize(
    ("ranks", "said"), [("3", "cannot be cut into TP 2"), ("many", "numbers of ranks"), ("0,8", "numbers of ranks")]
)
def test_a_number_of_ranks_that_cannot_be_is_refused(capsys, ranks, said):
    assert main(["plan", f"--control-plane={ranks}", *BATCH]) == 2
    assert said in capsys.readouterr().err


def test_without_a_model_there_is_no_workload_to_balance(capsys):
    assert main(["plan", "--control-plane=8", "actor.ppo_micro_batch_size_per_gpu=1"]) == 2
    assert "model.path or model.preset" in capsys.readouterr().err
