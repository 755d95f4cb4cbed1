"""Drawing tokens: greedy, temperature, top-k, top-p and reproducible streams."""

import pytest
import torch

from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.engines.sampling import draw, uniforms

pytestmark = pytest.mark.unit

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
PROBS = LOGITS.softmax(-1)[0]


def drawn_shares(count=20000, **knobs) -> torch.Tensor:
    uniform = uniforms([(0,)], count)[0]
    tokens, _ = draw(LOGITS.expand(count, -1), uniform, SamplingParams(1, **knobs))
    return tokens.bincount(minlength=4) / count


def test_draws_follow_the_distribution():
    assert torch.allclose(drawn_shares(), PROBS, atol=0.01)


def test_temperature_scales_the_logits():
    assert torch.allclose(drawn_shares(temperature=2.0), (LOGITS[0] / 2).softmax(-1), atol=0.01)


def test_top_k_keeps_the_likeliest_and_renormalises():
    expected = torch.cat([PROBS[:2] / PROBS[:2].sum(), torch.zeros(2)])
    assert torch.allclose(drawn_shares(top_k=2), expected, atol=0.01)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    expected = torch.cat([PROBS[:2] / PROBS[:2].sum(), torch.zeros(2)])
    assert torch.allclose(drawn_shares(top_p=0.7), expected, atol=0.01)
    assert torch.equal(drawn_shares(top_p=0.5), torch.tensor([1.0, 0, 0, 0]))


def test_greedy_takes_the_likeliest_at_temperature_one():
    tokens, log_probs = draw(LOGITS, torch.tensor([0.999]), SamplingParams(1, temperature=0.0))
    assert tokens.item() == 0
    assert log_probs.item() == pytest.approx(PROBS[0].log().item(), abs=1e-6)


@pytest.mark.parametrize(("knobs", "kept"), [({"top_k": 2}, 2), ({"top_p": 0.9}, 2), ({"top_k": 1, "top_p": 0.3}, 1)])
def test_log_probs_are_those_of_the_tokens_that_are_kept(knobs, kept):
    tokens, log_probs = draw(LOGITS, torch.tensor([0.2]), SamplingParams(1, temperature=0.5, **knobs))
    expected = (LOGITS[0, :kept] / 0.5).log_softmax(-1)[tokens.item()]
    assert log_probs.item() == pytest.approx(expected.item(), abs=1e-6)


def test_without_top_p_and_top_k_log_probs_are_those_of_all_tokens():
    tokens, log_probs = draw(LOGITS, torch.tensor([0.999]), SamplingParams(1, temperature=0.5))
    assert log_probs.item() == (LOGITS[0] / 0.5).log_softmax(-1)[tokens.item()].item()


def test_a_request_has_the_same_stream_in_any_batch():
    both = uniforms([(1, 2), (3, 4)], 5)
    assert torch.equal(both[1], uniforms([(3, 4)], 5)[0])
    assert not torch.equal(both[0], both[1])
