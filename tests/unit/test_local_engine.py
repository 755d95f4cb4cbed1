"""The local engine against transformers: greedy text, log-probs, stops, and the same answers in any batch."""

import pytest
import torch

from mppo.errors import ModelError
from mppo.rollout.engines.contract import Request, SamplingParams
from mppo.rollout.engines.local import LocalEngine
from mppo.weights.live_weights import LiveWeights
from mppo.weights.presets import PRESETS

pytestmark = pytest.mark.unit

PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8), (9,)]


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    hf_config, tokenizer = PRESETS.get("char").fn({})
    return LocalEngine(hf_config, tokenizer, torch.float32, torch.device("cpu"), batch_size=2)


def requests(prompts=PROMPTS):
    return [Request(i, i, p, (0, i)) for i, p in enumerate(prompts)]


def test_greedy_answers_are_those_of_transformers(engine):
    params = SamplingParams(6, temperature=0.0, ignore_eos=True)
    for request, answer in zip(requests(), engine.generate(requests(), params), strict=True):
        expected = engine.model.generate(
            torch.tensor([request.prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer.tokens.tolist() == expected[0].tolist()
        assert answer.finish_reason == "length"


def test_log_probs_are_those_of_a_dense_forward_at_the_temperature(engine):
    for answer in engine.generate(requests(), SamplingParams(6, temperature=0.7, top_p=0.9, ignore_eos=True)):
        with torch.no_grad():
            logits = engine.model(answer.tokens[None]).logits[0] / 0.7
        dense = logits.log_softmax(-1)[:-1].gather(1, answer.tokens[1:, None])[:, 0]
        assert torch.allclose(answer.rollout_log_probs[answer.action_mask], dense[answer.action_mask[1:]], atol=1e-5)
        assert (answer.rollout_log_probs[~answer.action_mask] == 0).all()


def test_an_answer_does_not_depend_on_the_batch_it_is_in(engine):
    params = SamplingParams(6, ignore_eos=True)
    together = engine.generate(requests(), params)
    for request, answer in zip(requests(), together, strict=True):
        (alone,) = engine.generate([request], params)
        assert alone.tokens.tolist() == answer.tokens.tolist()


def test_a_stop_token_ends_the_answer_and_stays_in_it(engine):
    whole = engine.generate(requests(), SamplingParams(6, temperature=0.0, ignore_eos=True))[0].tokens.tolist()
    stop = whole[len(PROMPTS[0]) + 1]
    params = SamplingParams(6, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    answer = engine.generate(requests(), params)[0]
    assert answer.tokens.tolist() == whole[: whole.index(stop, len(PROMPTS[0])) + 1]
    assert answer.finish_reason == "stop"


def test_a_stop_text_ends_the_answer(engine):
    whole = engine.generate(requests(), SamplingParams(6, temperature=0.0, ignore_eos=True))[1]
    text = engine.tokenizer.decode(whole.tokens[len(PROMPTS[1]) : len(PROMPTS[1]) + 2])
    answer = engine.generate(requests(), SamplingParams(6, temperature=0.0, ignore_eos=True, stop=(text,)))[1]
    assert answer.tokens.tolist() == whole.tokens[: len(PROMPTS[1]) + 2].tolist()
    assert answer.finish_reason == "stop"


def test_no_requests_give_no_trajectories(engine):
    assert engine.generate([], SamplingParams(3)) == []


def test_weights_must_be_complete(engine):
    tensors = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    engine.update_weights(LiveWeights.of_tensors(tensors), version=3)
    assert engine.generate(requests(), SamplingParams(1))[0].weight_version == 3
    last = list(tensors)[-1]
    with pytest.raises(ModelError, match=f"did not receive {last}"):
        engine.update_weights(LiveWeights.of_tensors({n: t for n, t in tensors.items() if n != last}), version=4)
    with pytest.raises(ModelError, match="no tensor nonsense"):
        engine.update_weights(LiveWeights.of_tensors(tensors | {"nonsense": torch.zeros(1)}), version=4)


def test_new_weights_are_those_given(engine):
    """Each update makes its plan for the weights it is given."""
    for value in (0.5, 0.25):
        tensors = {n: torch.full_like(p, value) for n, p in engine.model.named_parameters()}
        engine.update_weights(LiveWeights.of_tensors(tensors), version=4)
        assert all((p == value).all() for p in engine.model.parameters())
