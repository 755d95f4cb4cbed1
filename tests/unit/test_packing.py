from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.batch.packed import pack, unpack
from mppo.errors import DataError
from tests.unit.samples import answer, batches, differing_fields, pack_answers, packed_batches, trajectory, vectors

pytestmark = pytest.mark.unit


def test_a_state_is_about_predicting_the_next_token():
    batch = pack_answers([answer([0, 0, 1, 1], index=1, score=2.0), answer([0, 1, 0], index=2)], [4, 7])
    assert batch.indices.tolist() == [4, 7]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.token_ids.tolist() == [100, 101, 102, 103, 200, 201, 202]
    assert batch.labels.tolist() == [101, 102, 103, 0, 201, 202, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.mask.int().tolist() == [0, 1, 1, 0, 1, 0, 0]
    assert batch["rollout_log_probs"].tolist() == [0, -3, -4, 0, -2, 0, 0]
    assert batch["rewards"].tolist() == [0, 0, 2, 0, 0, 0, 0]


def test_the_outcome_is_given_at_the_last_action_on_top_of_token_rewards():
    dense = torch.tensor([0.0, 0.5, 0.25, 0.0])
    batch = pack_answers([answer([0, 1, 1, 0], score=2.0, token_rewards=dense)])
    assert batch["rewards"].tolist() == [0.5, 2.25, 0, 0]
    assert dense.tolist() == [0.0, 0.5, 0.25, 0.0]


@given(batches())
def test_unpacking_gives_back_what_was_packed(answers):
    batch, trajectories = pack_answers(answers), [a.trajectory for a in answers]
    for packed, name in [
        (batch.mask, "action_mask"),
        (batch["rollout_log_probs"], "rollout_log_probs"),
    ]:
        assert [x.tolist() for x in unpack(batch, packed)] == [getattr(t, name).tolist() for t in trajectories]
    for labels, t in zip(unpack(batch, batch.labels), trajectories, strict=True):
        assert labels[1:].tolist() == t.token_ids[1:].tolist()


@given(st.data())
def test_selecting_is_packing_a_selection(data):
    answers = data.draw(batches())
    which = data.draw(
        st.permutations(range(len(answers))).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n]))
    )
    batch = pack_answers(answers)
    piece = batch.select(which)
    assert not differing_fields(piece, pack_answers([answers[i] for i in which], which))
    assert torch.equal(piece.token_ids, batch.token_ids[piece.origin])


@given(st.data(), st.integers(1, 9))
def test_padding_fills_up_to_the_multiple_and_changes_nothing_else(data, multiple):
    batch = data.draw(packed_batches())
    values, prepared = data.draw(vectors(2, len(batch)))
    batch = batch.with_fields({"values": values, "prepared/covers": prepared > 0})
    batch = replace(batch, origin=torch.arange(len(batch)))
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
    assert sum(piece.real_tokens for piece in slices) == len(batch)
    assert [piece.actions()[1].pad_to_multiple(4).real_tokens for piece in slices] == [p.real_tokens for p in slices]


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
    batch = batch.with_fields({"token_weights": torch.arange(6.0), "prepared/covers": torch.arange(6) > 0})
    twice = batch.select([2, 0]).select([1])
    assert (twice.indices.tolist(), twice["token_weights"].tolist(), twice.origin.tolist()) == ([0], [0, 1], [2, 3])
    assert twice.prepared["covers"].tolist() == [False, True]


@given(batches())
def test_actions_are_the_masked_positions_under_their_trajectories(answers):
    batch, trajectories = pack_answers(answers), [a.trajectory for a in answers]
    rows, actions = batch.actions()
    assert torch.equal(actions.token_ids, batch.token_ids[batch.mask])
    assert actions.lengths == [t.action_count for t in trajectories]
    assert torch.equal(actions.segments.ids, batch.segments.ids[batch.mask])
    assert torch.equal(rows, batch.mask.nonzero().squeeze(-1))


def test_fields_are_set_taken_away_and_asked_for_by_name():
    batch = pack([trajectory([0, 1])]).with_fields(values=torch.ones(2))
    assert batch["values"].tolist() == [1, 1]
    assert batch.with_fields(values=None).get("values") is None
    assert batch.with_fields({"prepared/covers": torch.zeros(2)}, values=None).prepared.keys() == {"covers"}
    with pytest.raises(DataError, match="no field 'advantages'; it has rollout_log_probs, values"):
        batch["advantages"]
    with pytest.raises(DataError, match="no field 'values'; it has none"):
        batch.only(())["values"]


def test_a_name_stands_for_all_fields_below_it():
    batch = pack([trajectory([0, 1])]).with_fields({"prepared/a": torch.ones(2), "prepared/b": torch.zeros(2)})
    assert batch.only(["prepared"]).fields.keys() == {"prepared/a", "prepared/b"}
    assert batch.only(["prepared/a", "absent"]).fields.keys() == {"prepared/a"}
    assert torch.equal(batch.only(()).token_ids, batch.token_ids)


@given(batches())
def test_labels_and_positions_follow_from_the_lengths(answers):
    """Those of whole trajectories laid end to end, some of them of one token."""
    batch = pack_answers(answers)
    for labels, positions, length, ids in zip(
        batch.labels.split(batch.lengths),
        batch.positions.split(batch.lengths),
        batch.lengths,
        batch.token_ids.split(batch.lengths),
        strict=True,
    ):
        assert labels.tolist() == [*ids[1:].tolist(), 0]
        assert positions.tolist() == list(range(length))


def test_what_trains_is_what_is_kept_of_the_actions():
    batch = pack([trajectory([0, 1, 1])])
    assert torch.equal(batch.loss_mask, batch.mask)
    kept = torch.tensor([True, False, False])
    assert torch.equal(batch.with_fields(kept=kept).loss_mask, kept)
    assert torch.equal(batch.with_fields(kept=kept).mask, batch.mask)


def test_a_batch_is_exchanged_vector_by_vector():
    batch = pack([trajectory([0, 1], index=0), trajectory([0, 1, 1], index=1)]).select([0, 1])
    batch = batch.with_fields({"values": torch.arange(5.0), "prepared/covers": torch.arange(5) > 2})
    taken = batch.exchanged([2, 1], [5, 3], lambda x: x[[0, 1, 4]])
    assert taken.cu_seqlens.tolist() == [0, 2, 3]
    assert taken.indices.tolist() == [5, 3]
    assert (taken.token_ids.tolist(), taken["values"].tolist()) == ([0, 1, 102], [0, 1, 4])
    assert (taken.labels.tolist(), taken.positions.tolist()) == ([1, 0, 0], [0, 1, 0])
    assert taken.prepared["covers"].tolist() == [False, False, True]
    assert taken.origin is None
