"""The rollout buffer: complete groups wait, the oldest go first, on every rank alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.group_selection import has_signal
from mppo.batch.trajectory import Status
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from mppo.errors import DataError
from mppo.rollout.buffer import Buffer
from mppo.rollout.prompt_group import Group
from tests.unit.samples import answer
from tests.unit.simulated_layouts import gathered

pytestmark = pytest.mark.unit


def group(number: int, scores: tuple[float, ...] = (0.0, 1.0)) -> Group:
    return Group(number, f"prompt {number}", tuple(answer([0, 1], i, score) for i, score in enumerate(scores)))


def differs(of: Group) -> bool:
    return has_signal([a.judgement.total_reward for a in of.samples])


def alone(numbers):
    """The gather of a run on one rank."""
    return [numbers]


class Numbered:
    """Prompts that are what their numbers say, from the `first` on."""

    def __init__(self, first: int = 0):
        self.first = first

    def __contains__(self, number: int) -> bool:
        return number >= self.first

    def __getitem__(self, number: int) -> str:
        return f"prompt {number}"


def buffer_of(gather=alone, admits=None, rank: int = 0, ranks: int = 1) -> Buffer:
    return Buffer(gather, Numbered(), rank, ranks, admits)


def gather_over(reduction):
    def gather(numbers):
        ready, silent = (gathered(torch.tensor(one, dtype=torch.long), reduction) for one in numbers)
        return [(r.tolist(), s.tolist()) for r, s in zip(ready, silent, strict=True)]

    return gather


def numbers_of(taken) -> list[int]:
    return [one.number for one in taken.groups]


arrivals = st.lists(st.integers(0, 40), unique=True, max_size=12)
"""Numbers of prompts in the order in which their groups are complete."""


@given(arrivals, st.integers(1, 5))
def test_the_oldest_are_taken_in_whatever_order_they_came(numbers, count):
    buffer = buffer_of()
    for number in numbers:
        buffer.put(group(number))
    assert buffer.ready() == len(numbers)
    waiting = sorted(numbers)
    while waiting:
        taken = buffer.take(count)
        assert numbers_of(taken) == waiting[:count]
        waiting = waiting[count:]
        assert taken.left_over == buffer.ready() == len(waiting)
    assert numbers_of(buffer.take(count)) == []


@settings(max_examples=30, deadline=None)
@given(arrivals, st.integers(1, 3), st.integers(1, 6), st.data())
def test_all_ranks_agree_on_what_is_taken_whoever_holds_it(numbers, ranks, count, data):
    """With groups without a signal among them."""
    silent = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
    held = [[n for n in numbers if n % ranks == rank] for rank in range(ranks)]

    def one_step(mine, reduction):
        buffer = buffer_of(gather_over(reduction), differs)
        for number in mine:
            buffer.put(group(number, (1.0, 1.0) if number in silent else (0.0, 1.0)))
        return buffer.ready(), buffer.take(count), buffer.ready()

    found = on_simulated_ranks(held, one_step)
    with_signal = sorted(set(numbers) - silent)
    filling = sorted(silent)[: max(count - len(with_signal), 0)]
    chosen = sorted([*with_signal[:count], *filling])
    assert sorted(n for _, taken, _ in found for n in numbers_of(taken)) == chosen
    for mine, (before, taken, after) in zip(held, found, strict=True):
        assert numbers_of(taken) == [n for n in chosen if n in mine]
        assert before == len(with_signal)
        assert taken.left_over == after == max(len(with_signal) - count, 0)
        assert (taken.without_signal, taken.used_without_signal) == (len(silent), len(filling))


@given(
    st.dictionaries(st.integers(0, 30), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4)),
    st.integers(1, 6),
)
def test_groups_with_signal_come_first_and_nothing_is_lost(values, wanted):
    buffer = buffer_of(alone, differs)
    for number, scores in values.items():
        buffer.put(group(number, tuple(scores)))
    taken = buffer.take(wanted)
    chosen = set(numbers_of(taken))
    signal = {number for number, scores in values.items() if len(set(scores)) > 1}
    assert len(chosen) == min(wanted, len(values))
    assert len(chosen & signal) == min(wanted, len(signal))
    assert taken.without_signal == len(values) - len(signal)
    assert taken.used_without_signal == len(chosen - signal)
    assert taken.left_over == len(signal - chosen)


def test_what_is_left_over_comes_first_in_the_next_step():
    """Groups without a signal fill up a step that finds too few, and are dropped after it."""
    scores = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0), 4: (0, 1)}
    buffer = buffer_of(alone, differs)
    for number, of_group in scores.items():
        buffer.put(group(number, of_group))
    assert numbers_of(buffer.take(2)) == [1, 3]
    buffer.put(group(5))
    buffer.put(group(6, (1.0, 1.0)))
    assert numbers_of(buffer.take(3)) == [4, 5, 6]
    assert buffer.ready() == 0


def test_without_a_condition_every_group_is_ready():
    buffer = buffer_of()
    buffer.put(group(0, (1.0, 1.0)))
    assert (buffer.ready(), buffer.take(1).without_signal) == (1, 0)


@pytest.mark.parametrize("scores", [(0.0, 1.0), (1.0, 1.0)])
def test_a_number_that_waits_already_is_refused(scores):
    buffer = buffer_of(alone, differs)
    buffer.put(group(3, scores))
    with pytest.raises(DataError, match="prompt 3 of the run was answered twice"):
        buffer.put(group(3))


def test_a_group_of_which_every_answer_was_aborted_or_abstains_has_no_signal():
    answers = (answer([0, 1], 0, 1.0, status=Status.ABORTED), answer([0, 1], 1, None), answer([0, 1], 2, 0.0))
    buffer = buffer_of(alone, differs)
    buffer.put(Group(0, "prompt", answers))
    buffer.put(Group(1, "prompt", answers[:2]))
    assert buffer.ready() == 0


def test_a_refused_step_gives_back_what_it_took_and_forgets_what_it_drew():
    buffer = buffer_of(admits=differs)
    buffer.put(group(0))
    buffer.put(group(1))
    before = buffer.snapshot()
    buffer.put(group(2))
    buffer.put(group(3, (1.0, 1.0)))
    assert numbers_of(buffer.take(2)) == [0, 1]
    buffer.put_back(before)
    taken = buffer.take(5)
    assert (numbers_of(taken), taken.without_signal) == ([0, 1], 0)


@given(arrivals, st.integers(1, 4), st.integers(1, 4))
def test_what_waits_is_dealt_out_to_another_number_of_ranks(numbers, before, after):
    saved = []
    for rank in range(before):
        buffer = buffer_of()
        for number in numbers[rank::before]:
            buffer.put(group(number))
        saved.append(buffer.state_dict())
    found = []
    for rank in range(after):
        buffer = buffer_of(rank=rank, ranks=after)
        buffer.put(group(99))  # of the run that is given up
        buffer.load_state_dicts(saved)
        found.append(buffer.take(len(numbers) + 1).groups)
    for rank, groups in enumerate(found):
        assert [one.number for one in groups] == sorted(n for n in numbers if n % after == rank)
        for one in groups:
            saved_one = group(one.number)
            assert one.prompt == saved_one.prompt
            for answer_now, answer_saved in zip(one.answers, saved_one.answers, strict=True):
                assert answer_now.judgement == answer_saved.judgement
                assert str(answer_now.trajectory) == str(answer_saved.trajectory)


def test_groups_of_prompts_that_are_not_known_any_more_are_left_out_and_counted():
    saved = buffer_of()
    for number in (3, 4, 5):
        saved.put(group(number))
    resumed = Buffer(alone, Numbered(first=5), 0, 1, None)
    resumed.load_state_dicts([saved.state_dict()])
    assert (resumed.dropped, list(resumed.snapshot())) == (2, [5])
