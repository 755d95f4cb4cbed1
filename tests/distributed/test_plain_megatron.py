"""The hook in somebody else's Megatron script."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun_succeeds

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "plain_megatron.py"


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_rewarded_tokens_become_likelier_and_the_others_less_likely(tp, pp, tmp_path):
    torchrun_succeeds(tp * pp, SCRIPT, tmp_path / "history.json", tp, pp)
    rewarded, punished = zip(*json.loads((tmp_path / "history.json").read_text()), strict=True)
    assert rewarded[-1] > rewarded[0] + 0.5
    assert punished[-1] < punished[0] - 0.5


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 85
