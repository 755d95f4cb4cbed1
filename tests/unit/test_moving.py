import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.reduction import Reduction
from mppo.batch.moving import moved
from mppo.batch.packed import pack
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.samples import assignments, batches, differing_fields, held_by, trajectory, with_every_field

pytestmark = pytest.mark.unit

RANKS = 3


def all_to_all(rank: int, exchange: Reduction):
    """What `exchange_rows` does between processes."""

    def swap(x, sent, received):
        sizes = exchange.gather(torch.tensor(sent))
        pieces = exchange.gather(x).split(sizes.tolist())
        mine = [pieces[source * RANKS + rank] for source in range(RANKS)]
        assert [len(piece) for piece in mine] == received
        return torch.cat(mine)

    return swap


@given(st.data())
def test_after_a_move_each_rank_has_what_it_would_have_been_given_at_first(data):
    whole = with_every_field(pack(data.draw(batches())))
    lengths = whole.lengths
    before, after = (data.draw(assignments(len(lengths), RANKS)) for _ in range(2))
    parts = [(rank, whole.select(held)) for rank, held in enumerate(held_by(before, RANKS))]

    def move(part, exchange):
        rank, batch = part
        return moved(batch, before, after, lengths, rank, RANKS, all_to_all(rank, exchange))

    for batch, held in zip(on_simulated_ranks(parts, move), held_by(after, RANKS), strict=True):
        assert not differing_fields(batch, whole.select(held))
        assert batch.indices.tolist() == held
        assert batch.origin is None


def test_a_batch_is_exchanged_field_by_field():
    batch = pack([trajectory([0, 1], index=0), trajectory([0, 1, 1], index=1)]).select([0, 1])
    batch = batch.with_fields(values=torch.arange(5.0), prepared={"covers": torch.arange(5) > 2})
    taken = batch.exchanged([2, 1], lambda x: x[[0, 1, 4]], lambda x: x[[1, 0]])
    assert taken.cu_seqlens.tolist() == [0, 2, 3]
    assert taken.indices.tolist() == [1, 0]
    assert (taken.tokens.tolist(), taken.values.tolist()) == ([0, 1, 102], [0, 1, 4])
    assert taken.prepared["covers"].tolist() == [False, False, True]
    assert taken.origin is None


def test_every_field_that_a_batch_can_have_is_set():
    batch = with_every_field(pack([trajectory([0, 1])]))
    assert [name for name, value in vars(batch).items() if value is None] == ["origin", "count"]
    assert batch.prepared
