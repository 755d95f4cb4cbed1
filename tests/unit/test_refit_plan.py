"""What `mppo plan` says of a refit, against numbers worked out by hand for two large models on 128 and 1,024 GPUs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mppo.cli.compose import load_config
from mppo.cli.main import main
from mppo.errors import ConfigError
from mppo.megatron.topology import data_parallel_size
from mppo.planning.machines import Links, in_words, place
from mppo.planning.refit import Refit, plan_refit
from mppo.trainer.run_spec import make_run_spec
from mppo.weights.architectures import architecture_of
from mppo.weights.presets import PRESETS
from mppo.weights.pretrained import read_model_config
from mppo.weights.sglang_layout import Worker
from mppo.weights.transfer_plan import LARGEST_SEND

pytestmark = pytest.mark.unit

LARGE_MODELS = Path(__file__).parent / "large_models"
BF16 = 2
CARD = 400e9 / 8
"""Bytes a second."""

LLAMA_PARAMETERS = 2 * 128256 * 8192 + 8192 + 80 * (2 * 8192 * 8192 + 2 * 8 * 128 * 8192 + 3 * 8192 * 28672 + 2 * 8192)
LLAMA_LAYER_OF_A_WORKER = BF16 * (
    2 * 8192 * 8192 // 8 + 2 * 128 * 8192 + 3 * 8192 * 28672 // 8 + 2 * 8192  # one key/value head each
)
LLAMA_ENDS_OF_A_WORKER = BF16 * (2 * 128256 // 8 * 8192 + 8192)
QWEN_PARAMETERS = (
    2 * 151936 * 4096
    + 4096
    + 94 * (2 * 64 * 128 * 4096 + 2 * 4 * 128 * 4096 + 2 * 128 + 128 * 4096 + 128 * 3 * 1536 * 4096 + 2 * 4096)
)
QWEN_LAYER_OF_A_WORKER = BF16 * (
    2 * 8 * 128 * 4096
    + 2 * 1 * 128 * 4096  # 4 key/value heads, each on two of 8 workers
    + 2 * 128
    + 128 * 4096
    + 16 * 3 * 1536 * 4096
    + 2 * 4096
)
QWEN_ENDS_OF_A_WORKER = BF16 * (2 * 151936 // 8 * 4096 + 4096)


def refit(name: str, ranks: int, servers: int) -> Refit:
    """On servers with hosts of their own, which nobody speaks to."""
    urls = ",".join(f"http://gpu{number}:30000" for number in range(servers))
    config = load_config(name, [f"rollout.sglang.urls=[{urls}]"], str(LARGE_MODELS))
    spec = make_run_spec(config, data_parallel_size(config.parallel, ranks))
    hf, _ = PRESETS.get(str(config.model.preset)).fn(dict(config.model.preset_options))
    return plan_refit(spec, architecture_of(hf), read_model_config(config.model), Links())


@pytest.mark.parametrize(("ranks", "servers"), [(128, 16), (1024, 64)])
@pytest.mark.parametrize(
    ("name", "parameters", "layers", "layer", "ends"),
    [
        ("llama_70b", LLAMA_PARAMETERS, [20] * 4, LLAMA_LAYER_OF_A_WORKER, LLAMA_ENDS_OF_A_WORKER),
        (
            "qwen3_235b_a22b",
            QWEN_PARAMETERS,
            [11, 12, 12, 12, 12, 12, 12, 11],
            QWEN_LAYER_OF_A_WORKER,
            QWEN_ENDS_OF_A_WORKER,
        ),
    ],
)
def test_the_numbers_are_those_of_the_hand(name, parameters, layers, layer, ends, ranks, servers):
    found = refit(name, ranks, servers)
    worker = sum(layers) * layer + ends
    assert (found.servers, found.workers, found.dtype) == (servers, 8, "bfloat16")
    assert found.model_bytes == BF16 * parameters
    assert (found.minimum.least, found.minimum.most) == (worker, worker)
    assert found.received == found.minimum and found.received_over_minimum == 1.0
    assert (found.bytes_within, found.share_within) == (0, 0.0)
    assert found.bytes_between == sum(rank.between for rank in found.ranks) == 8 * servers * worker
    replicas = ranks // len(layers)
    for stage in range(1, len(layers) - 1):
        of_stage = [rank.between for rank in found.ranks[stage * replicas : (stage + 1) * replicas]]
        assert sum(of_stage) == 8 * servers * layers[stage] * layer
        mean = sum(of_stage) / replicas
        assert all(abs(sent - mean) <= LARGEST_SEND for sent in of_stage)
    assert found.bound_s.receiver_nic == pytest.approx(worker / CARD)
    assert found.bound_s.sender_nic == pytest.approx(found.sent.most / CARD)
    assert found.bound_s.whole == max(found.bound_s.receiver_nic, found.bound_s.sender_nic)
    assert found.broadcast_s.whole == pytest.approx(servers * BF16 * parameters / CARD)
    assert found.messages.most <= found.sent.most / found.bucket_bytes * 1.5 + 10 * found.peers.most


def plan(capsys, *arguments: str) -> dict:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["weights_to_sglang"]


SMALL = ("--config-name", "class", "rollout.engine=sglang", "rollout.sglang.servers=2", "parallel=tp2_pp2")


def test_launched_servers_stand_beside_the_ranks(capsys):
    """Two servers of two workers: on one machine all stays there, on machines of two GPUs what goes to the other."""
    options = (*SMALL, "rollout.sglang.tensor_parallel_size=2")
    near = plan(capsys, "--world-size", "4", *options)
    assert (near["share_within"], near["bytes_between"], near["bound_s"]["sender_nic"]) == (1.0, 0, 0.0)
    assert near["bound_s"]["whole"] == max(near["sent"]["most"], near["received"]["most"]) / 450e9
    far = plan(capsys, "--world-size", "4", "--gpus-per-machine=2", "--nic-gbit=8", "--nvlink-gbyte=1", *options)
    assert far["bytes_within"] + far["bytes_between"] == near["bytes_within"] and 0 < far["share_within"] < 1
    assert far["bound_s"]["sender_nic"] == max(rank["between"] for rank in far["ranks"]) / 1e9
    assert far["broadcast_s"]["whole"] == far["model_bytes"] / 1e9
    assert far["links"] == asdict(Links(8, 1, 2))


def test_the_table_says_where_servers_are_assumed_and_compares_with_a_broadcast(capsys):
    assert main(["plan", "--world-size", "4", *SMALL]) == 0
    table = capsys.readouterr().out
    for shown in ("weights to SGLang", "2 x 1", "trainer's machines", "shards", "broadcast", "400 Gbit/s"):
        assert shown in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nic-gbit=100"], "--nic-gbit has no effect without a model"),
        (["--config-name=class", "--gpus-per-machine=4"], "--gpus-per-machine has no effect but with rollout.engine"),
        ([*SMALL, "--nvlink-gbyte=0"], "--nvlink-gbyte is 0; it must be a number greater than 0"),
        ([*SMALL, "rollout.sglang.tensor_parallel_size=3"], "neither divides the other"),
    ],
)
def test_options_that_would_do_nothing_or_cannot_be_are_refused(capsys, arguments, said):
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_servers_stand_where_their_urls_say():
    """A server larger than a machine is on two; one of this machine is on the first rank's."""
    found = place(16, servers=3, workers=4, urls=["http://a:1", "http://a:2", "http://localhost:3"], gpus=2)
    assert found.of_rank[:3] == [("trainer", 0), ("trainer", 0), ("trainer", 1)]
    hosts = [found.of_worker[Worker(server, rank)] for server in range(3) for rank in range(4)]
    assert hosts[:4] == hosts[4:8] == [("a", 0), ("a", 0), ("a", 1), ("a", 1)]
    assert hosts[8:] == [("trainer", 0)] * 2 + [("trainer", 1)] * 2
    assert found.is_within(0, Worker(2, 0)) and not found.is_within(0, Worker(0, 0))
    assert "urls" in in_words([], ranks=16, gpus=8) and "urls" not in in_words([], ranks=8, gpus=8)


def test_links_name_the_option():
    with pytest.raises(ConfigError, match="--gpus-per-machine is 0"):
        Links(gpus_per_machine=0)
