"""The local engine against transformers: greedy text, log-probs, stops, and the same answers in any batch."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from mppo.batch.trajectory import Span, Status, TrajectoryId
from mppo.errors import EngineError, ModelError
from mppo.rollout.engines.contract import SamplingParams
from tests.unit.engines import ask, own_weights, request, small_engine, update

pytestmark = pytest.mark.unit

PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8), (9,)]
GREEDY = SamplingParams(6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(6, ignore_eos=True)
NO_SUCH_ID = (10**6,)


@pytest.fixture(scope="module")
def engine():
    found = small_engine(batch_size=2)
    update(found, own_weights(found), version=3)
    return found


@pytest.fixture
def reads(engine):
    """The shape of the ids of every forward pass: rows, and new tokens of each."""
    shapes = []

    def note(module, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    handle = engine.model.register_forward_pre_hook(note, with_kwargs=True)
    yield shapes
    handle.remove()


def requests(params, prompts=PROMPTS):
    return [request(number, prompt, params) for number, prompt in enumerate(prompts)]


def test_greedy_answers_are_those_of_transformers(engine):
    asked = requests(GREEDY)
    for one, answer in zip(asked, ask(engine, asked), strict=True):
        expected = engine.model.generate(
            torch.tensor([one.prompt_ids]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert [*one.prompt_ids, *answer.token_ids] == expected[0].tolist()
        assert answer.status == Status.TRUNCATED


@pytest.mark.parametrize(("temperature", "scale"), [(0.7, 0.7), (0.0, 1.0)])
def test_log_probs_are_those_of_a_dense_forward_at_the_temperature(engine, temperature, scale):
    """Of greedy answers at temperature 1."""
    asked = requests(SamplingParams(6, temperature, ignore_eos=True))
    for one, answer in zip(asked, ask(engine, asked), strict=True):
        ids = torch.tensor([[*one.prompt_ids, *answer.token_ids]])
        with torch.no_grad():
            log_probs = (engine.model(ids).logits[0] / scale).log_softmax(-1)
        dense = log_probs[:-1].gather(1, ids[0, 1:, None])[len(one.prompt_ids) - 1 :, 0]
        assert torch.allclose(torch.tensor(answer.log_probs), dense, atol=1e-5)


@pytest.mark.parametrize("params", [SAMPLED, GREEDY])
def test_an_answer_does_not_depend_on_the_batch_it_is_in(engine, params):
    asked = requests(params, [*PROMPTS, (1, 2, 3), (7, 7), tuple(range(20))])
    for one, answer in zip(asked, ask(engine, asked), strict=True):
        (alone,) = ask(engine, [one])
        assert (alone.token_ids, alone.status) == (answer.token_ids, answer.status)
        assert alone.log_probs == pytest.approx(answer.log_probs, abs=1e-5)


def test_nothing_is_written_for_those_who_gave_up(engine, reads):
    async def give_up():
        tasks = [asyncio.ensure_future(engine.generate(one)) for one in requests(SAMPLED)]
        await asyncio.sleep(0)
        for task in tasks[:-1]:
            task.cancel()
        return await tasks[-1]

    assert asyncio.run(give_up()).token_ids
    assert [batch for batch, _ in reads] == [1] * len(reads)


def test_requests_that_are_sampled_differently_wait_together(engine):
    """Those of one batch are sampled alike, so these are answered in several."""
    asked = [
        request(number, prompt, params)
        for number, (prompt, params) in enumerate(
            (prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED, SamplingParams(3, ignore_eos=True))
        )
    ]
    together = ask(engine, asked)
    assert [answer.token_ids for answer in together] == [ask(engine, [one])[0].token_ids for one in asked]
    assert [len(answer.token_ids) for answer in together] == [6, 6, 3] * 3


def test_a_prompt_that_several_share_goes_through_the_model_once(engine, reads):
    engine.batch_size = 4
    same, other = (4, 5, 6, 7, 8), (3, 2, 1)
    group = [request(number, same, SAMPLED) for number in range(3)]
    asked = [*group, request(3, other, SAMPLED)]
    together = ask(engine, asked)
    assert reads == [(2, len(same)), *[(4, 1)] * 5]

    reads.clear()
    ask(engine, group)
    assert reads == [(1, len(same)), *[(3, 1)] * 5]
    alone = [ask(engine, [one])[0] for one in asked]
    engine.batch_size = 2
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert len({answer.token_ids for answer in together[:3]}) > 1  # one prompt, several seeds


def test_a_stop_token_ends_the_answer_and_stays_in_it(engine):
    asked = requests(GREEDY)
    whole = ask(engine, asked)[0].token_ids
    stop = whole[1]
    answer = ask(engine, requests(replace(GREEDY, stop_token_ids=(stop,))))[0]
    assert answer.token_ids == whole[: whole.index(stop) + 1]
    assert answer.status == Status.FINISHED
    assert answer.spans == (Span(0, len(answer.token_ids), 3),)


def test_a_stop_text_ends_the_answer(engine):
    whole = ask(engine, requests(GREEDY))[1].token_ids
    text = engine.tokenizer.decode(whole[:2])
    answer = ask(engine, requests(replace(GREEDY, stop=(text,))))[1]
    assert answer.token_ids == whole[:2]
    assert answer.status == Status.FINISHED


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_deadline_aborts_an_answer_and_its_neighbours_go_on(engine, batch_size):
    """What is written by then is given back."""
    engine.batch_size = batch_size
    late, alone = request(0, (1, 2, 3), SAMPLED, timeout_s=0.0), request(1, (1, 2, 3), SAMPLED)
    aborted, whole = ask(engine, [late, alone])
    engine.batch_size = 2
    assert (aborted.status, len(aborted.token_ids)) == (Status.ABORTED, 1)
    assert (whole.status, len(whole.token_ids)) == (Status.TRUNCATED, 6)
    assert aborted.token_ids == ask(engine, [replace(late, timeout_s=60.0)])[0].token_ids[:1]
    assert aborted.spans == (Span(0, 1, 3),)


def test_an_answer_that_is_complete_when_its_deadline_is_seen_is_complete(engine):
    (answer,) = ask(engine, [request(0, (1, 2, 3), SamplingParams(1, ignore_eos=True), timeout_s=0.0)])
    assert (answer.status, len(answer.token_ids)) == (Status.TRUNCATED, 1)


def test_an_error_reaches_those_who_asked_and_the_engine_goes_on(engine):
    """Also where one of them does not wait for it any more."""
    under_way, go_on = threading.Event(), threading.Event()

    def hold(*_):
        under_way.set()
        go_on.wait(timeout=20)

    async def ask_what_fails():
        broken = [asyncio.ensure_future(engine.generate(request(n, NO_SUCH_ID, GREEDY))) for n in range(2)]
        fine = asyncio.ensure_future(engine.generate(request(2, (1, 2, 3), SAMPLED)))
        await asyncio.to_thread(under_way.wait, 20)
        broken[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.wait_for(asyncio.gather(*broken, fine, return_exceptions=True), timeout=20)

    handle = engine.model.register_forward_pre_hook(hold)
    cancelled, failed, answered = asyncio.run(ask_what_fails())
    handle.remove()
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(failed, IndexError)
    assert len(answered.token_ids) == 6


def test_without_weights_there_are_no_answers():
    engine = small_engine()
    with pytest.raises(EngineError, match="no weights: none came yet, or the last update failed"):
        ask(engine, requests(GREEDY))


def test_after_a_failed_update_there_are_none_until_one_succeeds():
    engine = small_engine()
    tensors = own_weights(engine)
    update(engine, tensors, version=3)
    before = ask(engine, requests(GREEDY))
    last = list(tensors)[-1]
    with pytest.raises(ModelError, match=f"did not receive {last}"):
        update(engine, {name: x for name, x in tensors.items() if name != last}, version=4)
    with pytest.raises(EngineError, match="no weights"):
        ask(engine, requests(GREEDY))
    with pytest.raises(ModelError, match="no tensor nonsense"):
        update(engine, tensors | {"nonsense": torch.zeros(1)}, version=4)
    with pytest.raises(EngineError, match="no weights"):
        ask(engine, requests(GREEDY))
    update(engine, tensors, version=5)
    after = ask(engine, requests(GREEDY))
    assert [a.token_ids for a in after] == [b.token_ids for b in before]
    assert {span.weight_version for a in after for span in a.spans} == {5}


def test_new_weights_are_those_given():
    """Each update makes its plan for the weights it is given."""
    engine = small_engine()
    for value in (0.5, 0.25):
        update(engine, {name: torch.full_like(p, value) for name, p in own_weights(engine).items()}, version=4)
        assert all((p == value).all() for p in engine.model.parameters())


def test_a_request_belongs_to_the_group_of_its_prompt():
    assert replace(requests(GREEDY)[0], uid=TrajectoryId(7, 3, part=1)).group == 7


def test_a_stop_text_of_many_tokens_a_character_is_found():
    """Bytes as tokens: each character of the stop text takes four."""
    engine = small_engine()
    engine.tokenizer = Utf8()
    stop = "\U0001f600" * 5
    written = [torch.tensor([byte]) for byte in (stop + "a").encode()]
    params = replace(GREEDY, stop=(stop,))
    found = [bool(engine._ends_with_stop(written[: i + 1], params)) for i in range(len(written))]
    assert found == [False] * 19 + [True] * 2


class Utf8:
    """Bytes are tokens."""

    def batch_decode(self, rows, **_):
        return [bytes(row.tolist()).decode(errors="replace") for row in rows]
