"""Weights of a TP2 x PP2 actor to live workers, compared with a folder that SGLang's own loader has read."""

import pytest

from tests.distributed.model_folders import write_model
from tests.distributed.ranks import call_on_ranks
from tests.sglang.cases import agreement, transports

pytestmark = pytest.mark.sglang

TRANSPORTS = ("shards", "handles", "broadcast", "disk", "delta")
SIZES = {"intermediate_size": 128}
"""SGLang's CPU server pads feed-forward layers to a multiple of 32 columns for each worker; here it need not."""


@pytest.fixture(scope="module")
def found(sglang_environment, tmp_path_factory):
    return call_on_ranks(transports, 4, sglang_environment, tmp_path_factory.mktemp("transports"), timeout=400)[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_workers_hold_what_a_fresh_load_gives_them(found, transport):
    """Bit for bit, in bfloat16; the weights before were spoiled."""
    assert found[transport]["parameters"] == 30
    assert found[transport]["odd"] == []


@pytest.mark.parametrize("transport", ["shards", "delta"])
def test_no_tensor_is_gathered(found, transport):
    """The sums are flags of a rank's failure, and the check of checksums goes from rank to rank."""
    assert "gloo:send" in found[transport]["communication"]
    assert set(found[transport]["communication"]) <= {
        *("gloo:send", "gloo:recv", "gloo:all_reduce"),
        *("c10d::send", "c10d::recv_", "c10d::allreduce_"),
    }


def test_fifty_deltas_leave_what_a_fresh_load_gives(found):
    assert found["deltas"]["parameters"] == 30
    assert found["deltas"]["odd"] == []


def test_a_delta_is_as_large_as_what_changed(found):
    """A place and a value for each entry, and a number for each part."""
    unit = 4 + 2
    assert unit <= found["deltas"]["received"] / found["deltas"]["changed"] <= 1.1 * unit


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("qwen2", 1), ("qwen3", 2), ("qwen3-moe", 1)])
def test_the_server_and_the_trainer_agree_on_log_probs(sglang_environment, tmp_path, name, tp):
    changes = SIZES | ({"moe_intermediate_size": 64} if "moe" in name else {})
    folder = write_model(name, tmp_path / "model", **changes)
    largest = call_on_ranks(agreement, 4, sglang_environment, tmp_path / "run", folder, tp, timeout=300)[0]
    assert largest < 1e-4
