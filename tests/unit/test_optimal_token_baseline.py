"""The optimal token baseline against its definition, place by place over padded rows."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.advantage_cases import advantage_batches, estimate, outcomes

pytestmark = pytest.mark.unit

BOTH = ["optimal_token_baseline", "tir_optimal_token_baseline"]


def row_of(rewards, mask, kept, log_probs, squares, weights):
    """One answer: of each action that trains its place since the first action, reward to go and gathered variance."""
    row, gathered = [], 0.0
    for t in range(len(mask)):
        if kept[t]:
            gathered += (1 - 2 * exp(log_probs[t]) + squares[t]) * weights[t] ** 2
            to_go = sum(r for r, m in zip(rewards[t:], mask[t:], strict=True) if m)
            row.append((t, t - mask.index(True), to_go, gathered))
    return row


def reference(x, lengths, counts_actions, handle_zero_tail):
    """`A[t] = G[t] - sum(G W) / sum(W)` over the answers of the group that have an action at the place of t."""
    weights = torch.ones_like(x.rewards) if x.rollout_is_weights is None else x.rollout_is_weights
    fields = (x.rewards, x.action_mask, x.loss_mask, x.old_log_probs, x.sum_pi_squared, weights)
    rows = [row_of(*(row.tolist() for row in of)) for of in zip(*(f.split(lengths) for f in fields), strict=True)]
    tables = [  # place -> (G, W)
        {(i if counts_actions else place): (to_go, gathered) for i, (_, place, to_go, gathered) in enumerate(row)}
        for row in rows
    ]
    advantages = [[0.0] * length for length in lengths]
    for i, (row, table) in enumerate(zip(rows, tables, strict=True)):
        group = [other for g, other in zip(x.groups.tolist(), tables, strict=True) if g == x.groups[i] and other]
        extents = sorted((max(other) + 1 for other in group), reverse=True)
        for (t, *_), (place, (to_go, _)) in zip(row, table.items(), strict=True):
            at_place = [other[place] for other in group if place in other]
            baseline = sum(g * w for g, w in at_place) / (sum(w for _, w in at_place) + 1e-8)
            if len(group) == 1 or (handle_zero_tail and place >= extents[1]):
                baseline = 0.0
            advantages[i][t] = to_go - baseline
    return [a for row in advantages for a in row]


@pytest.mark.parametrize("name", BOTH)
@given(advantage_batches(max_trajectories=8, max_length=9), st.booleans(), st.booleans())
def test_it_is_the_definition(name, drawn, weighted, handle_zero_tail):
    """With holes in the mask, rejected actions, groups of one and answers without any action."""
    batch, x = drawn
    x = x if weighted else replace(x, rollout_is_weights=None)
    expected = reference(x, batch.lengths, name.startswith("tir"), handle_zero_tail)
    result = estimate(name, x, handle_zero_tail=handle_zero_tail)
    assert result.advantages.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)


def answers(log_probs, lengths, scores, **others):
    """Of one group; a token of log-prob 0 has no variance, one of a small probability nearly 1."""
    log_probs = torch.tensor(log_probs, dtype=torch.double)
    squares = (2 * log_probs).exp()
    x = outcomes(scores, [0] * len(scores), lengths, **others)
    return replace(x, old_log_probs=log_probs, sum_pi_squared=squares)


@pytest.mark.parametrize("name", BOTH)
def test_answers_of_equal_variance_share_the_mean_as_baseline(name):
    x = answers([log(0.5)] * 4, [2, 2], [3.0, 1.0])
    assert estimate(name, x).advantages.tolist() == pytest.approx([1.0, 1.0, -1.0, -1.0])


@pytest.mark.parametrize("name", BOTH)
def test_an_answer_of_which_the_policy_was_certain_does_not_move_the_baseline(name):
    """`1 - 2 pi + pi^2` is 0 at pi = 1; the second answer's is 0.25, then 0.5."""
    x = answers([0.0, 0.0, log(0.5), log(0.5)], [2, 2], [3.0, 1.0])
    assert estimate(name, x).advantages.tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("name", BOTH)
def test_variance_is_gathered_along_the_answer_and_counts_the_square_of_importance_weights(name):
    """0.25 each; with weights 2 and 1 the first answer gathers 1, 2 and the second 0.25, 0.5: four to one."""
    x = answers([log(0.5)] * 4, [2, 2], [5.0, 0.0], rollout_is_weights=torch.tensor([2.0, 2.0, 1.0, 1.0]))
    assert estimate(name, x).advantages.tolist() == pytest.approx([1.0, 1.0, -4.0, -4.0])
    x = answers([0.0, log(0.5), log(0.5), log(0.5)], [2, 2], [3.0, 0.0])  # 0, 0.25 and 0.25, 0.5: one to two
    assert estimate(name, x).advantages.tolist() == pytest.approx([3.0, 2.0, 0.0, -1.0], abs=1e-6)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("handle_zero_tail", "tail"), [(True, 4.0), (False, 0.0)])
def test_the_longest_answer_has_no_baseline_beyond_the_second_longest(name, handle_zero_tail, tail):
    """Its own reward would be all there is to compare with."""
    x = answers([log(0.5)] * 6, [3, 2, 1], [4.0, 1.0, 1.0])
    advantages = estimate(name, x, handle_zero_tail=handle_zero_tail).advantages.tolist()
    assert advantages == pytest.approx([2.0, 1.5, tail, -1.0, -1.5, -1.0], abs=1e-6)


def test_tool_output_takes_up_places_unless_only_actions_count():
    """The second answer's last action is its third token and its second action."""
    x = answers([log(0.5)] * 6, [3, 3], [4.0, 2.0])
    actions = torch.tensor([True, True, True, True, False, True])
    x = replace(x, action_mask=actions, loss_mask=actions)
    plain, tir = (estimate(name, x).advantages.tolist() for name in BOTH)
    assert plain == pytest.approx([1.0, 0.0, 4 - 4 * 0.6 - 2 * 0.4, -1.0, 0.0, 2 - 4 * 0.6 - 2 * 0.4], abs=1e-6)
    assert tir == pytest.approx([1.0, 1.0, 4.0, -1.0, 0.0, -1.0], abs=1e-6)


@pytest.mark.parametrize("name", BOTH)
def test_a_group_of_one_keeps_its_rewards_to_go(name):
    x = replace(answers([log(0.5)] * 3, [3], [4.0]), rewards=torch.tensor([1.0, 0.0, 4.0]))
    assert estimate(name, x).advantages.tolist() == [5.0, 4.0, 4.0]
    assert estimate(name, x).returns.tolist() == [5.0, 4.0, 4.0]


def test_rejecting_the_first_action_does_not_shift_the_others():
    """Of four to two at the second place, where the answers have gathered 0.25 and 0.5."""
    x = answers([log(0.5)] * 6, [3, 3], [4.0, 2.0], kept=[False, True, True, True, True, True])
    second = 4 / 3 + 2 * 2 / 3
    advantages = estimate("optimal_token_baseline", x).advantages.tolist()
    assert [advantages[1], advantages[4]] == pytest.approx([4 - second, 2 - second], abs=1e-6)
