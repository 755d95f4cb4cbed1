import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.packed import pack, unpack
from mppo.errors import DataError
from tests.unit.samples import batches, differing_fields, packed_batches, trajectory, vectors

pytestmark = pytest.mark.unit


def test_a_state_is_about_predicting_the_next_token():
    batch = pack([trajectory([0, 0, 1, 1], index=1, reward=2.0), trajectory([0, 1, 0], index=2)])
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.tokens.tolist() == [100, 101, 102, 103, 200, 201, 202]
    assert batch.labels.tolist() == [101, 102, 103, 0, 201, 202, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.mask.int().tolist() == [0, 1, 1, 0, 1, 0, 0]
    assert batch.rollout_log_probs.tolist() == [0, -3, -4, 0, -2, 0, 0]
    assert batch.rewards.tolist() == [0, 0, 2, 0, 0, 0, 0]


def test_the_outcome_is_given_at_the_last_action_on_top_of_token_rewards():
    dense = torch.tensor([0.0, 0.5, 0.25, 0.0])
    batch = pack([trajectory([0, 1, 1, 0], reward=2.0, token_rewards=dense)])
    assert batch.rewards.tolist() == [0.5, 2.25, 0, 0]
    assert dense.tolist() == [0.0, 0.5, 0.25, 0.0]


@given(batches())
def test_unpacking_gives_back_what_was_packed(trajectories):
    batch = pack(trajectories)
    for packed, name in [
        (batch.mask, "action_mask"),
        (batch.rollout_log_probs, "rollout_log_probs"),
    ]:
        assert [x.tolist() for x in unpack(batch, packed)] == [getattr(t, name).tolist() for t in trajectories]
    for labels, t in zip(unpack(batch, batch.labels), trajectories, strict=True):
        assert labels[1:].tolist() == t.tokens[1:].tolist()


@given(st.data())
def test_selecting_is_packing_a_selection(data):
    trajectories = data.draw(batches())
    which = data.draw(
        st.permutations(range(len(trajectories))).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
    )
    batch = pack(trajectories)
    piece = batch.select(which)
    assert not differing_fields(piece, pack([trajectories[i] for i in which]))
    assert torch.equal(piece.tokens, batch.tokens[piece.origin])


@given(st.data(), st.integers(1, 9))
def test_padding_fills_up_to_the_multiple_and_changes_nothing_else(data, multiple):
    batch = data.draw(packed_batches())
    values, prepared = data.draw(vectors(2, len(batch)))
    batch = batch.with_fields(values=values, prepared={"covers": prepared > 0}, origin=torch.arange(len(batch)))
    padded = batch.pad_to_multiple(multiple)
    extra = len(padded) - len(batch)
    assert 0 <= extra < multiple and len(padded) % multiple == 0
    assert padded.cu_seqlens[-1] == len(padded)
    assert not differing_fields(padded.select(range(len(batch.lengths))), batch)
    assert padded.segments.lengths(padded.mask)[len(batch.lengths) :].sum() == 0
    assert padded.indices[len(batch.lengths) :].tolist() == [-1] * (extra > 0)
    assert padded.positions[len(batch) :].tolist() == list(range(extra))
    assert padded.pad_to_multiple(multiple) is padded


@given(st.data(), st.integers(1, 9), st.integers(1, 3))
def test_tokens_of_trajectories_are_counted_once_whatever_the_padding(data, multiple, size):
    batch = data.draw(packed_batches())
    whole = batch.select(range(len(batch.lengths)))
    slices = [whole.context_slice(rank, size).pad_to_multiple(multiple) for rank in range(size)]
    assert sum(piece.num_tokens for piece in slices) == len(batch)
    assert [piece.actions()[1].pad_to_multiple(4).num_tokens for piece in slices] == [p.num_tokens for p in slices]


def test_a_micro_batch_of_nothing_pads_to_one_whole_multiple():
    padded = pack([trajectory([0, 1])]).select([]).pad_to_multiple(8)
    assert len(padded) == 8
    assert not padded.mask.any()


def test_no_trajectories_pack_to_an_empty_batch():
    batch = pack([])
    assert (len(batch), batch.lengths, batch.segments.count) == (0, [], 0)


@given(st.data())
def test_what_is_computed_on_pieces_goes_back_where_it_came_from(data):
    batch = data.draw(packed_batches())
    values = data.draw(vectors(len(batch)))
    order = data.draw(st.permutations(range(len(batch.lengths))))
    cut = data.draw(st.integers(0, len(order)))
    pieces = [batch.select(which).pad_to_multiple(4) for which in (order[:cut], order[cut:])]
    computed = [torch.where(piece.origin >= 0, values[piece.origin], torch.nan) for piece in pieces]
    assert torch.equal(batch.gather_back([p.origin for p in pieces], computed), values)


def test_positions_that_no_piece_holds_are_zero():
    batch = pack([trajectory([0, 1]), trajectory([0, 1, 1])])
    piece = batch.select([1])
    assert batch.gather_back([piece.origin], [torch.ones(3)]).tolist() == [0, 0, 1, 1, 1]
    assert batch.gather_back([], []).tolist() == [0] * 5


def test_cutting_twice_keeps_all_fields_and_points_to_the_last_cut():
    batch = pack([trajectory([0, 1], index=i) for i in range(3)])
    batch = batch.with_fields(token_weights=torch.arange(6.0), prepared={"covers": torch.arange(6) > 0})
    twice = batch.select([2, 0]).select([1])
    assert (twice.indices.tolist(), twice.token_weights.tolist(), twice.origin.tolist()) == ([0], [0, 1], [2, 3])
    assert twice.prepared["covers"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("mask", "change", "named"),
    [
        ([0, 1], {"action_mask": torch.ones(3, dtype=torch.bool)}, "action_mask has shape"),
        ([0, 1], {"rollout_log_probs": torch.zeros(1)}, "rollout_log_probs has shape"),
        ([0, 1], {"token_rewards": torch.zeros(1)}, "token_rewards has shape"),
        ([], {}, "no tokens"),
        ([1, 1], {}, "the first token is an action"),
        ([0, 1], {"tokens": torch.tensor([5, 1000])}, "token 1 has id 1000, outside the vocabulary of 1000"),
        ([0, 1], {"tokens": torch.tensor([-1, 5])}, "token 0 has id -1"),
        ([0, 1], {"rollout_log_probs": torch.tensor([0.0, -torch.inf])}, "a log-prob that is not finite"),
    ],
)
def test_what_is_wrong_with_a_trajectory_is_named_with_it(mask, change, named):
    with pytest.raises(DataError, match=rf"trajectory 7 \(prompt 3\): .*{named}"):
        trajectory(mask, index=7, group=3, **change).validate(vocab_size=1000)


@given(batches())
def test_good_trajectories_are_valid(trajectories):
    for t in trajectories:
        t.validate(vocab_size=1000)


@given(batches())
def test_actions_are_the_masked_positions_under_their_trajectories(trajectories):
    batch = pack(trajectories)
    rows, actions = batch.actions()
    assert torch.equal(actions.tokens, batch.tokens[batch.mask])
    assert actions.lengths == [t.actions for t in trajectories]
    assert torch.equal(actions.segments.ids, batch.segments.ids[batch.mask])
    assert torch.equal(rows, batch.mask.nonzero().squeeze(-1))
