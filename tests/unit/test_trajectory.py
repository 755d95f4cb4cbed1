"""Names of trajectories, and what is refused of a trajectory and of a judgement."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.trajectory import Judgement, Purpose, Span, Status, TrajectoryId, Turn
from mppo.errors import DataError
from tests.unit.samples import answer, batches, trajectory

pytestmark = pytest.mark.unit

NAMES = st.builds(TrajectoryId, st.integers(0, 20), st.integers(0, 4), st.integers(0, 2))


@given(st.lists(NAMES, max_size=8))
def test_names_sort_by_prompt_then_sample_then_part(names):
    assert [(n.prompt, n.sample, n.part) for n in sorted(names)] == sorted((n.prompt, n.sample, n.part) for n in names)


@given(st.sets(st.tuples(NAMES, st.integers(0, 3)), max_size=8))
def test_no_two_names_or_runs_share_a_seed(drawn):
    assert len({name.seed(run) for name, run in drawn}) == len(drawn)


def test_a_name_is_said_in_words():
    assert str(TrajectoryId(12, 3)) == "prompt 12, sample 3"
    assert str(TrajectoryId(12, 3, 1)) == "prompt 12, sample 3, part 1"


@given(batches())
def test_good_trajectories_and_judgements_are_valid(answers):
    for a in answers:
        a.trajectory.validate(vocab_size=1000)
        a.judgement.validate(len(a.trajectory))


@pytest.mark.parametrize(
    ("mask", "change", "named"),
    [
        ([0, 1], {"action_mask": torch.ones(3, dtype=torch.bool)}, "action_mask has shape"),
        ([0, 1], {"action_mask": torch.ones(2)}, "action_mask is torch.float32; it must be bool"),
        ([0, 1], {"rollout_log_probs": torch.zeros(1)}, "rollout_log_probs has shape"),
        ([], {}, "no tokens"),
        ([1, 1], {}, "the first token is an action"),
        ([0, 1], {"token_ids": torch.tensor([5, 1000])}, "token 1 has id 1000, outside the vocabulary of 1000"),
        ([0, 1], {"token_ids": torch.tensor([-1, 5])}, "token 0 has id -1"),
        ([0, 1], {"rollout_log_probs": torch.tensor([0.0, -torch.inf])}, "a log-prob that is not finite"),
        ([0, 1], {"spans": (Span(1, 3, 0),)}, r"Span\(start=1, stop=3, .* does not lie within its 2 tokens"),
        ([0, 1], {"turns": (Turn(2, 1),)}, r"Turn\(start=2, stop=1\) does not lie within"),
    ],
)
def test_what_is_wrong_with_a_trajectory_is_named_with_it(mask, change, named):
    with pytest.raises(DataError, match=f"trajectory of prompt 3, sample 1: .*{named}"):
        trajectory(mask, index=7, **{"token_ids": torch.arange(len(mask)), **change}).validate(vocab_size=1000)


@pytest.mark.parametrize(
    ("score", "token_rewards", "named"),
    [
        (0.0, torch.zeros(1), r"token_rewards has shape \(1,\), for 2 tokens"),
        (float("nan"), None, "a reward is not finite"),
        (None, torch.tensor([0.0, torch.inf]), "a reward is not finite"),
    ],
)
def test_what_is_wrong_with_a_judgement_is_named_with_its_trajectory(score, token_rewards, named):
    with pytest.raises(DataError, match=f"judgement of prompt 3, sample 1: {named}"):
        Judgement(TrajectoryId(3, 1), score, token_rewards=token_rewards).validate(length=2)


def test_the_response_is_what_the_policy_wrote_without_output_of_tools():
    one = trajectory([0, 1, 0, 1, 0])
    assert (one.action_count, one.action_ids, len(one)) == (2, [1, 3], 5)
    assert trajectory([0]).action_count == 0


def test_the_total_reward_is_the_outcome_and_all_token_rewards():
    assert answer([0, 1], score=2.0, token_rewards=torch.tensor([0.0, 0.5])).judgement.total_reward == 2.5
    assert answer([0, 1], score=None).judgement.total_reward == 0


@pytest.mark.parametrize(
    ("changes", "trains"),
    [
        ({}, True),
        ({"status": Status.TRUNCATED}, True),
        ({"status": Status.ABORTED}, False),
        ({"purpose": Purpose.BASELINE}, False),
        ({"score": None}, False),
    ],
)
def test_aborted_answers_baselines_and_abstentions_do_not_train(changes, trains):
    assert answer([0, 1], **changes).trains is trains
