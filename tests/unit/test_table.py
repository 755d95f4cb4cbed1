"""What every rank knows of a step: the same table in whatever order answers arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.batch_plan import MicroBatchLimit
from mppo.batch.table import TrajectorySummary, TrajectoryTable, in_order_of_names
from mppo.batch.trajectory import Purpose, Span, Status, TrajectoryId
from mppo.errors import DataError
from mppo.megatron.model_config import ModelConfig
from mppo.trainer.batches import tabulate
from mppo.trainer.metrics import trajectory_metrics
from mppo.trainer.run_spec import UpdateSettings
from tests.unit.samples import answer, summary

pytestmark = pytest.mark.unit

LIMIT = MicroBatchLimit(trajectories=4)
SETTINGS = UpdateSettings(4, 1, True, LIMIT, LIMIT, "token-mean", 1.0)
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_query_groups=1,
    head_dim=4,
    ffn_hidden_size=16,
    vocab_size=32,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


@st.composite
def answered(draw) -> list[TrajectorySummary]:
    """Names with gaps; some are aborted, abstained or greedy."""
    found = []
    for prompt in sorted(draw(st.sets(st.integers(0, 50), min_size=1, max_size=4))):
        for sample in range(draw(st.integers(1, 3))):
            status, abstains = draw(st.sampled_from(Status)), draw(st.booleans())
            length, reward = draw(st.integers(2, 20)), draw(st.floats(-1, 1))
            about = dict(status=status, abstains=abstains, length=length, actions=length // 2, reward=reward)
            found.append(summary(TrajectoryId(prompt, sample), **about))
        if draw(st.booleans()):
            found.append(summary(TrajectoryId(prompt, 9), purpose=Purpose.BASELINE, reward=float(prompt)))
    return [*found, summary(TrajectoryId(99, 0))]


def table_of(summaries: list[TrajectorySummary], ranks: int = 1) -> TrajectoryTable:
    table, _, _ = tabulate(summaries, SETTINGS, MODEL, ranks, seed=0, step=0)
    return table


@given(answered(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_plan(summaries, ranks, rng):
    shuffled = list(summaries)
    rng.shuffle(shuffled)
    assert tabulate(shuffled, SETTINGS, MODEL, ranks, 0, 0) == tabulate(summaries, SETTINGS, MODEL, ranks, 0, 0)


@given(answered(), st.integers(1, 3))
def test_samples_that_were_finished_and_judged_train_and_the_others_are_counted(summaries, ranks):
    table = table_of(summaries, ranks)
    samples = [s for s in summaries if s.purpose == Purpose.SAMPLE]
    aborted = [s for s in samples if s.status == Status.ABORTED]
    abstained = [s for s in samples if s.abstains and s.status != Status.ABORTED]
    assert (table.left_out.aborted, table.left_out.abstained) == (len(aborted), len(abstained))
    assert len(table) + len(aborted) + len(abstained) == len(samples)
    assert all(s.trains for s in table.summaries)
    names = [s.uid for s in table.summaries]
    assert names == sorted(names)
    assert len(table.rank_of) == len(table) and set(table.rank_of) <= set(range(ranks))
    assert table.kept == [s.actions for s in table.summaries]


@given(answered())
def test_groups_are_numbered_in_the_order_of_their_prompts(summaries):
    table = table_of(summaries)
    numbers = dict(zip((s.uid.prompt for s in table.summaries), table.groups, strict=True))
    assert sorted(numbers.values()) == list(range(len(numbers)))
    assert sorted(numbers) == sorted(numbers, key=numbers.__getitem__)


def test_two_trajectories_of_one_name_are_refused():
    with pytest.raises(DataError, match="two trajectories have the name prompt 4, sample 1; number the parts"):
        in_order_of_names([summary(TrajectoryId(4, 1)), summary(TrajectoryId(0, 0)), summary(TrajectoryId(4, 1))])
    assert len(in_order_of_names([summary(TrajectoryId(4, 1)), summary(TrajectoryId(4, 1, part=1))])) == 2


def test_a_step_in_which_nothing_can_train_is_refused():
    aborted = [summary(TrajectoryId(0, i), status=Status.ABORTED) for i in range(3)]
    with pytest.raises(DataError, match="none of the 3 trajectories of this step can train"):
        table_of(aborted)


def test_each_answer_has_the_reward_of_the_greedy_answer_to_its_prompt():
    samples = [summary(TrajectoryId(prompt, i)) for prompt in (3, 8) for i in range(2)]
    greedy = [summary(TrajectoryId(prompt, 2), purpose=Purpose.BASELINE, reward=10.0 * prompt) for prompt in (3, 8)]
    assert table_of([*samples, *greedy]).reward_baselines == [30.0, 30.0, 80.0, 80.0]
    assert table_of(samples).reward_baselines is None


@pytest.mark.parametrize("lost", [{"status": Status.ABORTED}, {"abstains": True}])
def test_answers_without_the_greedy_answer_that_they_are_compared_with_do_not_train(lost):
    samples = [summary(TrajectoryId(prompt, 0)) for prompt in (3, 8)]
    greedy = [
        summary(TrajectoryId(3, 1), purpose=Purpose.BASELINE),
        summary(TrajectoryId(8, 1), purpose=Purpose.BASELINE, **lost),
    ]
    table = table_of([*samples, *greedy])
    assert [s.uid.prompt for s in table.summaries] == [3]
    assert table.left_out.without_baseline == 1


def test_parts_of_the_reward_that_every_trajectory_has():
    parts = [{"right": 1.0, "brief": 0.0}, {"right": 0.0}]
    table = table_of([summary(TrajectoryId(i, 0), parts=of) for i, of in enumerate(parts)])
    assert table.reward_parts == {"right": [1.0, 0.0]}


def test_a_summary_says_what_the_answer_is():
    one = answer([0, 0, 1, 1, 0, 1], index=7, score=2.0, status=Status.TRUNCATED)
    found = TrajectorySummary.of(one)
    assert found.uid == TrajectoryId(3, 1)
    assert (found.length, found.actions, found.status, found.purpose) == (6, 3, Status.TRUNCATED, Purpose.SAMPLE)
    assert (found.reward, found.outcome, found.abstains, found.trains) == (2.0, 2.0, False, True)
    assert TrajectorySummary.of(answer([0, 1], score=None)).abstains


def test_staleness_is_counted_in_actions_by_the_weights_that_wrote_them():
    """One action of version 3 and two of version 5; weights are at 6. An answer to nothing is no older than now."""
    spans = (Span(1, 2, 3), Span(2, 4, 5))
    mixed = TrajectorySummary.of(answer([0, 1, 1, 1], index=0, spans=spans))
    assert (mixed.oldest_version, mixed.mean_version) == (3, pytest.approx(13 / 3))
    fresh = TrajectorySummary.of(answer([0, 1], index=1, spans=(Span(1, 2, 6),)))
    metrics = trajectory_metrics(table_of([mixed, fresh]), weight_version=6)
    assert metrics["rollout/staleness/max"] == 3
    assert metrics["rollout/staleness/mean"] == pytest.approx((3 + 1 + 1 + 0) / 4)


def test_metrics_count_what_was_left_out():
    left_out = [
        summary(TrajectoryId(0, 1), status=Status.ABORTED),
        summary(TrajectoryId(0, 2), abstains=True),
        summary(TrajectoryId(0, 3), abstains=True),
    ]
    trained = summary(TrajectoryId(0, 0), status=Status.TRUNCATED, length=7, actions=5, accuracy=0.5, reward=2.0)
    metrics = trajectory_metrics(table_of([trained, *left_out]), weight_version=0)
    assert (metrics["rollout/aborted"], metrics["reward/abstained"]) == (1, 2)
    assert (metrics["batch/trajectories"], metrics["batch/tokens"], metrics["response_length/mean"]) == (1, 7, 5)
    assert (metrics["reward/mean"], metrics["reward/accuracy"], metrics["rollout/truncated_share"]) == (2.0, 0.5, 1)
