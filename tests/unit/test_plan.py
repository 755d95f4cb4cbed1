import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.plan import MicroBatchLimit, assign_ranks, plan_micro_batches, split_mini_batches, workload
from mppo.errors import ConfigError, DataError

pytestmark = pytest.mark.unit

batch_lengths = st.lists(st.integers(1, 50), max_size=25)
limits = st.one_of(
    st.builds(MicroBatchLimit, trajectories=st.integers(1, 5)), st.builds(MicroBatchLimit, tokens=st.integers(50, 120))
)


def flat(nested):
    return [index for part in nested for index in part]


@given(st.integers(0, 60), st.integers(1, 12), st.sampled_from([None, "1:0", "1:1"]))
def test_each_trajectory_is_in_one_mini_batch_of_nearly_equal_ones(count, size, seed):
    mini_batches = split_mini_batches(count, size, seed)
    sizes = [len(m) for m in mini_batches]
    assert sorted(flat(mini_batches)) == list(range(count))
    assert len(sizes) == -(-count // size)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_without_a_seed_mini_batches_are_cut_in_order():
    assert split_mini_batches(7, 3) == [[0, 1], [2, 3], [4, 5, 6]]


def test_a_seed_fixes_the_shuffle():
    assert split_mini_batches(32, 8, shuffle_seed="1") == split_mini_batches(32, 8, shuffle_seed="1")
    assert split_mini_batches(32, 8, shuffle_seed="1") != split_mini_batches(32, 8, shuffle_seed="2")


@given(batch_lengths, st.integers(1, 6), st.integers(1, 5))
def test_every_mini_batch_is_balanced_by_itself(lengths, size, ranks):
    mini_batches = split_mini_batches(len(lengths), size)
    rank_of = assign_ranks(mini_batches, lengths, ranks)
    assert set(rank_of) <= set(range(ranks))
    for mini_batch in mini_batches:
        loads = [sum(lengths[i] for i in mini_batch if rank_of[i] == rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= max(lengths[i] for i in mini_batch)


def test_one_long_trajectory_weighs_as_much_as_four_short_ones():
    assert assign_ranks([list(range(5))], [8.0, 2.0, 2.0, 2.0, 2.0], ranks=2) == [0, 1, 1, 1, 1]


def test_equal_work_is_spread_by_number():
    assert sorted(assign_ranks([list(range(6))], [0.0] * 6, ranks=3)) == [0, 0, 1, 1, 2, 2]


@given(batch_lengths, limits, st.integers(1, 4), st.integers(1, 3))
def test_micro_batches(lengths, limit, ranks, multiple):
    """The invariants of the module: complete, equal in number over ranks, a multiple, within the limit."""
    rank_of = assign_ranks([list(range(len(lengths)))], lengths, ranks)
    parts = [[i for i, r in enumerate(rank_of) if r == rank] for rank in range(ranks)]
    plan = plan_micro_batches(parts, lengths, limit, multiple)

    assert [sorted(flat(micro_batches)) for micro_batches in plan] == parts
    (count,) = {len(micro_batches) for micro_batches in plan}
    assert count >= multiple and count % multiple == 0
    for micro_batch in flat(plan):
        assert limit.trajectories is None or len(micro_batch) <= limit.trajectories
        assert limit.tokens is None or sum(lengths[i] for i in micro_batch) <= limit.tokens


@given(batch_lengths, st.integers(50, 120))
def test_there_are_never_more_micro_batches_than_trajectories(lengths, tokens):
    (micro_batches,) = plan_micro_batches([list(range(len(lengths)))], lengths, MicroBatchLimit(tokens=tokens))
    assert len(micro_batches) <= max(len(lengths), 1)


def test_the_token_budget_is_hard():
    """Eight trajectories of 7 tokens under a budget of 8: nothing fits together."""
    (micro_batches,) = plan_micro_batches([list(range(8))], [7] * 8, MicroBatchLimit(tokens=8))
    assert sorted(micro_batches) == [[i] for i in range(8)]


def test_ranks_with_different_needs_take_the_same_number_of_micro_batches():
    plan = plan_micro_batches([[0], [1, 2, 3], []], [10, 10, 10, 10], MicroBatchLimit(tokens=10), multiple=2)
    assert [sorted(map(len, micro_batches)) for micro_batches in plan] == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]]


def test_a_trajectory_over_the_budget_is_named():
    with pytest.raises(DataError, match="trajectory 1 has 12 tokens.*budget of 10.*max_token_len_per_gpu"):
        plan_micro_batches([[0], [1]], [3, 12], MicroBatchLimit(tokens=10))


@pytest.mark.parametrize("limit", [{}, {"trajectories": 1, "tokens": 1}])
def test_a_limit_is_either_trajectories_or_tokens(limit):
    with pytest.raises(ConfigError, match="either by trajectories or by tokens"):
        MicroBatchLimit(**limit)


def test_workload_grows_with_the_square_of_the_length():
    """Section 7: 24576 L + L^2 at a hidden size of 2048."""
    assert workload(1000, hidden_size=2048) == 24576 * 1000 + 1000**2
