"""The collector with a real engine and a real reward: complete, judged groups, whoever answers them."""

import asyncio
from dataclasses import replace

import pytest

from mppo.batch.trajectory import Purpose, Span, Status, TrajectoryId
from mppo.config import DataConfig, PromptSource, RewardConfig
from mppo.errors import EngineError
from mppo.rollout.agents import session
from mppo.rollout.agents.single_turn import single_turn
from mppo.rollout.answer_text import AnswerText
from mppo.rollout.buffer import Buffer
from mppo.rollout.collector import Asking, Collector, together
from mppo.rollout.engines.contract import Completion, SamplingParams
from mppo.rollout.prompts import PromptStream, load_prompts
from mppo.rollout.reward_workers import RewardWorkers
from mppo.rollout.tasks import rewards_of
from tests.unit.engines import own_weights, small_engine, update

pytestmark = pytest.mark.unit

VOCABULARY = 64
SAMPLED = SamplingParams(4, ignore_eos=True)
GREEDY = replace(SAMPLED, temperature=0.0)
ASKING = Asking(2, SAMPLED, GREEDY, run_seed=0, timeout_s=60.0, validation=GREEDY, prompts_per_draw=4)


@pytest.fixture(scope="module")
def engine():
    found = small_engine(batch_size=4)
    update(found, own_weights(found), version=3)
    return found


def collector(engine, asking=ASKING, rank=0, ranks=1, agent=single_turn):
    rewards = RewardWorkers(
        rewards_of(RewardConfig("class")),
        RewardConfig(workers=0),
        AnswerText(engine.tokenizer, {engine.tokenizer.eos_token_id}),
    )
    return Collector(engine, agent, rewards, asking, VOCABULARY, rank, ranks)


def stream(engine):
    source = PromptSource(generator="class", options={"size": 6})
    return PromptStream(load_prompts(source, "data.train", DataConfig(), engine.tokenizer, VOCABULARY), seed=0)


def collected(engine, draws=1, **where):
    """The groups that one rank answers."""
    one, prompts = collector(engine, **where), stream(engine)
    buffer = Buffer(lambda numbers: [numbers], prompts, one.rank, one.ranks)
    for _ in range(draws):
        one.collect(prompts, buffer)
    groups = buffer.take(100).groups
    one.close()
    return groups


def test_every_prompt_has_all_its_answers_judged(engine):
    groups = collected(engine, draws=2)
    assert [group.number for group in groups] == list(range(8))
    for group in groups:
        assert [a.trajectory.uid for a in group.answers] == [TrajectoryId(group.number, i) for i in range(2)]
        for answer in group.answers:
            assert answer.judgement.uid == answer.trajectory.uid
            assert answer.trajectory.token_ids[:2].tolist() == list(group.prompt.token_ids)
            assert answer.trajectory.action_count == 4
            text = engine.tokenizer.decode(answer.trajectory.action_ids, skip_special_tokens=True)
            belongs = str.isdigit if group.prompt.ground_truth == "d" else str.isalpha
            assert answer.judgement.score == sum(map(belongs, text)) / 4
        assert group.samples == list(group.answers)


def test_answers_do_not_depend_on_the_number_of_ranks(engine):
    """Each prompt belongs to one of them."""
    alone = {group.number: group for group in collected(engine)}
    dealt = [collected(engine, rank=rank, ranks=2) for rank in range(2)]
    assert [[group.number for group in groups] for groups in dealt] == [[0, 2], [1, 3]]
    for group in [group for groups in dealt for group in groups]:
        for one, other in zip(group.answers, alone[group.number].answers, strict=True):
            assert one.trajectory.action_ids == other.trajectory.action_ids
            assert one.judgement == other.judgement


def test_a_greedy_answer_stands_beside_the_samples_and_does_not_train(engine):
    for group in collected(engine, asking=replace(ASKING, with_baseline=True)):
        *samples, greedy = group.answers
        assert [a.trajectory.purpose for a in samples] == [Purpose.SAMPLE] * 2
        assert greedy.trajectory.purpose == Purpose.BASELINE
        assert greedy.trajectory.uid == TrajectoryId(group.number, 2)
        assert group.samples == samples
        assert greedy.judgement.score is not None


def test_answers_that_were_aborted_are_kept_and_not_judged(engine):
    for group in collected(engine, asking=replace(ASKING, timeout_s=0.0)):
        assert {a.trajectory.status for a in group.answers} == {Status.ABORTED}
        assert all(a.judgement.abstains for a in group.answers)
        assert group.samples == []


def test_validation_answers_greedily(engine):
    one = collector(engine)
    first, second = (one.validate(stream(engine).draw(3)) for _ in range(2))
    one.close()
    assert [a.trajectory.action_ids for a in first] == [a.trajectory.action_ids for a in second]
    assert [a.trajectory.uid.prompt for a in first] == [0, 1, 2]


def test_what_an_engine_raises_is_raised_as_it_is():
    with pytest.raises(EngineError, match="no weights"):
        collected(small_engine())


def test_an_engine_that_never_answers_is_named(engine, monkeypatch):
    async def never(request):
        await asyncio.Event().wait()

    monkeypatch.setattr(session, "GRACE_S", 0.05)
    monkeypatch.setattr(engine, "generate", never)
    with pytest.raises(EngineError, match=r"no answer to prompt \d, sample \d within rollout.timeout_s=0.05"):
        collected(engine, asking=replace(ASKING, timeout_s=0.05))


def test_an_agent_may_take_longer_than_each_of_its_calls(engine, monkeypatch):
    async def slow(prompt, asked):
        for turn in range(3):
            await asyncio.sleep(0.1)
            completion = await asked.complete(prompt.token_ids, turn=turn)
        return [asked.trajectory(prompt.token_ids, completion)]

    monkeypatch.setattr(session, "GRACE_S", 0.0)
    monkeypatch.setattr(engine, "generate", answer_at_once)
    groups = collected(engine, asking=replace(ASKING, timeout_s=0.2), agent=slow)
    assert [answer.trajectory.action_ids for answer in groups[0].answers] == [[1, 2]] * 2


async def answer_at_once(request):
    return Completion((1, 2), (-0.5, -0.5), (Span(0, 2, 0),), Status.FINISHED)


def test_the_first_error_ends_what_runs_beside_it():
    ended = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        asyncio.run(together(waits(), fails(), waits()))
    assert ended == [True, True]
