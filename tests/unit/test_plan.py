import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.balance import TOLERANCE, WorkloadModel, balanced_parts, best_fit
from mppo.batch.batch_plan import (
    MicroBatchLimit,
    assign_ranks,
    by_rank,
    plan_micro_batches,
    split_mini_batches,
)
from mppo.errors import ConfigError, DataError
from mppo.megatron.model_config import ModelConfig
from tests.unit.whole_plan import make_batch_plan

pytestmark = pytest.mark.unit

LLAMA_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    head_dim=128,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
)
COSTS = [float, WorkloadModel(linear=100.0, attention=1.0)]

batch_lengths = st.lists(st.integers(1, 50), max_size=25)
workloads_of_any_size = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e15)), max_size=30)
limits = st.one_of(
    st.builds(MicroBatchLimit, trajectories=st.integers(1, 5)), st.builds(MicroBatchLimit, tokens=st.integers(50, 120))
).map(MicroBatchLimit.of_replica)


def flat(nested):
    return [index for part in nested for index in part]


def loads_of(parts, workloads):
    return [math.fsum(workloads[i] for i in part) for part in parts]


def greedy_worst(workloads, count):
    loads = [0.0] * count
    for workload in sorted(workloads, reverse=True):
        loads[loads.index(min(loads))] += workload
    return max(loads)


def log_normal(count, seed, median=2000, sigma=1.0, cap=8192):
    rng = random.Random(seed)
    return [max(1, min(int(rng.lognormvariate(math.log(median), sigma)), cap)) for _ in range(count)]


# what a sequence costs


def test_a_token_costs_two_flops_per_weight():
    """Llama 3 8B: 6.98e9 weights in the layers, 0.53e9 in the output layer."""
    layers = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert WorkloadModel.of(LLAMA_8B).linear == 2 * (layers + 4096 * 128256)
    assert WorkloadModel.of(LLAMA_8B, projected=0.5).linear == 2 * (layers + 4096 * 128256 / 2)


def test_a_token_costs_the_experts_that_it_is_sent_to():
    mixture = replace(LLAMA_8B, num_experts=64, moe_topk=2, moe_ffn_hidden_size=1000)
    saved = 2 * 32 * 4096 * 3 * (14336 - 2 * 1000)
    assert WorkloadModel.of(LLAMA_8B).linear - WorkloadModel.of(mixture).linear == saved


def test_attention_costs_four_flops_per_pair_of_positions_and_channel():
    """Half the pairs are masked off."""
    pairs, length = 1000 * 1000 / 2, 1000
    model = WorkloadModel.of(LLAMA_8B)
    assert model(length) - model.linear * length == 4 * 32 * 4096 * pairs


# parts of equal work


@given(workloads_of_any_size, st.integers(1, 6))
def test_each_index_is_in_one_part_and_no_part_is_worse_than_by_greed(workloads, count):
    parts = balanced_parts(range(len(workloads)), workloads, count)
    assert len(parts) == count
    assert sorted(flat(parts)) == list(range(len(workloads)))
    assert all(part == sorted(part) for part in parts)

    loads, largest = loads_of(parts, workloads), max(workloads, default=0.0)
    rounding = 1 + 1e-9
    assert max(loads) <= greedy_worst(workloads, count) * rounding
    assert max(loads) <= (sum(workloads) / count + largest) * rounding
    assert max(loads) - min(loads) <= largest + max(loads) * 1e-9


@given(workloads_of_any_size, st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_order_of_indices_does_not_matter(workloads, count, rng):
    shuffled = list(range(len(workloads)))
    rng.shuffle(shuffled)
    assert balanced_parts(shuffled, workloads, count) == balanced_parts(range(len(workloads)), workloads, count)


def test_an_exchange_finds_what_greed_misses():
    """Greedy leaves 7 and 5; a 3 for a 2 makes it 6 and 6."""
    workloads = [3.0, 3.0, 2.0, 2.0, 2.0]
    assert greedy_worst(workloads, 2) == 7
    assert loads_of(balanced_parts(range(5), workloads, 2), workloads) == [6, 6]


def test_a_capacity_finds_what_exchanges_of_one_item_miss():
    """Exchanges end at 7 + 2 + 2 against 4 + 3 + 2; into parts of 10 goes 7 + 3 first."""
    workloads = [7.0, 4.0, 3.0, 2.0, 2.0, 2.0]
    assert loads_of(balanced_parts(range(6), workloads, 2), workloads) == [10, 10]


@given(st.lists(st.integers(1, 50), max_size=25), st.integers(50, 120))
def test_best_fit_stays_within_the_capacity(sizes, capacity):
    items = sorted(((size, i) for i, size in enumerate(sizes)), reverse=True)
    bins = best_fit(items, capacity)
    assert sorted(flat(bins), reverse=True) == items
    assert all(0 < sum(size for size, _ in items) <= capacity for items in bins)


@pytest.mark.parametrize("count, ranks", [(256, 32), (512, 64), (1024, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_the_worst_rank_of_long_tailed_lengths_has_at_most_two_percent_more_than_the_mean(count, ranks, seed):
    workloads = [WorkloadModel.of(LLAMA_8B)(n) for n in log_normal(count, seed)]
    loads = loads_of(balanced_parts(range(count), workloads, ranks), workloads)
    assert max(loads) <= 1.02 * sum(loads) / ranks


def test_one_huge_item_is_alone():
    parts = balanced_parts(range(50), [1.0] * 49 + [1e9], 4)
    assert [49] in parts
    assert sorted(map(len, parts)) == [1, 16, 16, 17]


# mini-batches


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


@given(batch_lengths, st.integers(1, 6), st.integers(1, 5))
def test_so_is_the_whole_batch(lengths, size, ranks):
    rank_of = assign_ranks(split_mini_batches(len(lengths), size), lengths, ranks)
    loads = loads_of(by_rank(range(len(lengths)), rank_of, ranks), lengths)
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_one_long_trajectory_weighs_as_much_as_four_short_ones():
    rank_of = assign_ranks([list(range(5))], [8.0, 2.0, 2.0, 2.0, 2.0], ranks=2)
    assert {rank_of[0]} ^ set(rank_of[1:]) == {0, 1}


def test_equal_work_is_spread_by_number():
    assert sorted(assign_ranks([list(range(6))], [0.0] * 6, ranks=3)) == [0, 0, 1, 1, 2, 2]


# micro-batches


@given(batch_lengths, limits, st.integers(1, 4), st.integers(1, 3), st.sampled_from(COSTS))
def test_micro_batches(lengths, limit, ranks, multiple, cost):
    """Complete, equal in number over ranks, a multiple, within the limit, the heaviest first, empty ones last."""
    rank_of = assign_ranks([list(range(len(lengths)))], lengths, ranks)
    parts = by_rank(range(len(lengths)), rank_of, ranks)
    plan = plan_micro_batches(parts, lengths, limit, multiple, cost)

    assert [sorted(flat(micro_batches)) for micro_batches in plan] == parts
    (count,) = {len(micro_batches) for micro_batches in plan}
    assert count >= multiple and count % multiple == 0
    for micro_batches in plan:
        costs = [sum(cost(lengths[i]) for i in micro_batch) for micro_batch in micro_batches]
        assert all(a >= b for a, b in pairwise(costs))
    for micro_batch in flat(plan):
        assert sum(map(limit.size, (lengths[i] for i in micro_batch))) <= limit.most


@given(batch_lengths, st.integers(50, 120))
def test_there_are_few_micro_batches(lengths, tokens):
    """No two of the fewest could be one: more than half of the budget is used, but for one micro-batch."""
    (micro_batches,) = plan_micro_batches(
        [list(range(len(lengths)))], lengths, MicroBatchLimit(tokens=tokens).of_replica()
    )
    assert len(micro_batches) <= max(len(lengths), 1)
    assert len(micro_batches) <= 2 * sum(lengths) / tokens + 1


def test_the_token_budget_is_hard():
    """Eight trajectories of 7 tokens under a budget of 8: nothing fits together."""
    (micro_batches,) = plan_micro_batches([list(range(8))], [7] * 8, MicroBatchLimit(tokens=8).of_replica())
    assert sorted(micro_batches) == [[i] for i in range(8)]


def test_a_tight_budget_is_kept_at_the_price_of_an_uneven_spread():
    """The longest first to the emptiest would need a third micro-batch."""
    (micro_batches,) = plan_micro_batches([list(range(5))], [5, 5, 4, 3, 3], MicroBatchLimit(tokens=10).of_replica())
    assert micro_batches == [[0, 1], [2, 3, 4]]


def test_work_is_spread_over_all_micro_batches():
    (by_tokens,) = plan_micro_batches(
        [list(range(4))], [9, 1, 1, 1], MicroBatchLimit(tokens=12).of_replica(), multiple=2
    )
    assert by_tokens == [[0], [1, 2, 3]]
    (by_number,) = plan_micro_batches([list(range(4))], [9, 1, 1, 8], MicroBatchLimit(trajectories=2).of_replica())
    assert by_number == [[0, 2], [1, 3]]


def test_ranks_with_different_needs_take_the_same_number_of_micro_batches():
    plan = plan_micro_batches(
        [[0], [1, 2, 3], []], [10, 10, 10, 10], MicroBatchLimit(tokens=10).of_replica(), multiple=2
    )
    assert [list(map(len, micro_batches)) for micro_batches in plan] == [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]


def test_a_trajectory_over_the_budget_is_named():
    limit = MicroBatchLimit(tokens=10, field="actor.ppo_max_token_len_per_gpu").of_replica()
    raising = "raise actor.ppo_max_token_len_per_gpu from 10 to 12 or more"
    with pytest.raises(DataError, match=f"trajectory 1 has 12 tokens, over the micro-batch budget of 10; {raising}"):
        plan_micro_batches([[0], [1]], [3, 12], limit)
    with pytest.raises(DataError, match="trajectory 1 has 12 tokens"):
        make_batch_plan([3, 12], mini_batch_size=1, ranks=2, limit=limit)


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 6]))
def test_a_limit_per_gpu_holds_after_slices_are_padded_and_the_error_says_what_would_suffice(
    per_gpu, length, cp, multiple
):
    """A trajectory that context parallelism cuts evenly, alone in a micro-batch."""
    length *= cp

    def padded_slice(tokens: int) -> int:
        return -(-tokens // (cp * multiple)) * multiple

    limit = MicroBatchLimit(tokens=per_gpu).of_replica(cp, multiple)
    assert limit.tokens == 0 or padded_slice(limit.tokens) <= per_gpu < padded_slice(limit.tokens + 1)
    if padded_slice(length) <= per_gpu:
        limit.check("trajectory 0", length)
        return
    with pytest.raises(DataError) as caught:
        limit.check("trajectory 0", length)
    needed = int(str(caught.value).rpartition(" to ")[2].removesuffix(" or more"))
    assert needed == padded_slice(length)
    MicroBatchLimit(tokens=needed).of_replica(cp, multiple).check("trajectory 0", length)


@pytest.mark.parametrize("limit", [{}, {"trajectories": 1, "tokens": 1}])
def test_a_limit_is_either_trajectories_or_tokens(limit):
    with pytest.raises(ConfigError, match="either by trajectories or by tokens"):
        MicroBatchLimit(**limit)


@pytest.mark.parametrize("limit", [{"trajectories": 0}, {"tokens": -1}])
def test_a_limit_is_positive(limit):
    with pytest.raises(ConfigError, match="must be positive"):
        MicroBatchLimit(**limit)


# the whole plan


@given(
    batch_lengths,
    st.integers(1, 12),
    st.integers(1, 6),
    limits,
    st.integers(1, 3),
    st.sampled_from(COSTS),
    st.sampled_from([None, "7/0"]),
)
def test_the_invariants_of_a_plan(lengths, size, ranks, limit, multiple, cost, seed):
    options = dict(mini_batch_size=size, limit=limit, multiple=multiple, cost=cost, shuffle_seed=seed)
    plan = make_batch_plan(lengths, ranks=ranks, **options)
    assert plan == make_batch_plan(list(lengths), ranks=ranks, **options)
    assert plan.mini_batches == make_batch_plan(lengths, ranks=1, **options).mini_batches
    assert sorted(flat(plan.mini_batches)) == list(range(len(lengths)))

    for mini_batch, by_ranks in zip(plan.mini_batches, plan.micro_batches, strict=True):
        assert len(by_ranks) == ranks
        assert sorted(flat(flat(by_ranks))) == mini_batch
        assert all(plan.rank_of[i] == rank for rank, micro_batches in enumerate(by_ranks) for i in flat(micro_batches))
        (count,) = {len(micro_batches) for micro_batches in by_ranks}
        assert count >= multiple and count % multiple == 0
        assert all(sum(limit.size(lengths[i]) for i in piece) <= limit.most for piece in flat(by_ranks))
        loads = [sum(cost(lengths[i]) for i in flat(micro_batches)) for micro_batches in by_ranks]
        assert max(loads) - min(loads) <= max(cost(lengths[i]) for i in mini_batch)


def test_a_batch_without_trajectories_has_no_mini_batches():
    plan = make_batch_plan([], mini_batch_size=4, ranks=3, limit=MicroBatchLimit(tokens=8).of_replica(), multiple=2)
    assert (plan.mini_batches, plan.rank_of, plan.micro_batches) == ([], [], [])


def test_ranks_without_a_trajectory_have_empty_micro_batches():
    plan = make_batch_plan([5, 6], mini_batch_size=4, ranks=4, limit=MicroBatchLimit(tokens=8).of_replica(), multiple=2)
    assert sorted(plan.micro_batches[0]) == [[[], []], [[], []], [[0], []], [[1], []]]


def test_many_trajectories_on_many_ranks_are_planned_within_the_tolerance():
    lengths, cost = log_normal(8192, seed=0), WorkloadModel.of(LLAMA_8B)
    plan = make_batch_plan(
        lengths, mini_batch_size=4096, ranks=128, limit=MicroBatchLimit(tokens=16384).of_replica(), cost=cost
    )
    for by_ranks in plan.micro_batches:
        loads = [sum(cost(lengths[i]) for i in flat(micro_batches)) for micro_batches in by_ranks]
        assert max(loads) <= (1 + TOLERANCE + 1e-9) * sum(loads) / len(loads)
