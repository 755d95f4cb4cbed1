"""The hook in somebody else's Megatron script."""

import pytest

from tests.distributed.launch import HERE, torchrun_results

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_rewarded_tokens_become_likelier_and_the_others_less_likely(tp, pp, tmp_path):
    history = torchrun_results("plain_megatron.py", tp * pp, tmp_path / "history.json", tp, pp)
    rewarded, punished = zip(*history, strict=True)
    assert rewarded[-1] > rewarded[0] + 0.5
    assert punished[-1] < punished[0] - 0.5


def test_the_script_is_short():
    assert len((HERE / "plain_megatron.py").read_text().splitlines()) < 85
