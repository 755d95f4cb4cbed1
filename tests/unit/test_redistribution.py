"""Trajectories that change hands between simulated ranks arrive whole, in order and unchanged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.policy_losses import policy_loss
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from mppo.megatron.objectives import PolicyObjective, ReferencePass, ValueObjective
from mppo.trainer.redistribution import deliver, moved
from tests.unit.samples import (
    answer,
    assignments,
    batches,
    differing_fields,
    held_by,
    pack_answers,
    table_of,
    with_every_field,
)
from tests.unit.simulated_layouts import in_world, world_of, worlds

pytestmark = pytest.mark.unit

RANKS = 3


@settings(max_examples=25)
@given(st.data())
def test_after_a_move_each_rank_has_what_it_would_have_been_given_at_first(data):
    whole = with_every_field(pack_answers(data.draw(batches())))
    lengths = whole.lengths
    before, after = (data.draw(assignments(len(lengths), RANKS)) for _ in range(2))
    world = world_of(tp=1, cp=1, pp=1, dp=RANKS)

    def move(here, links):
        held = [i for i, rank in enumerate(before) if rank == here.dp_rank]
        old, new = dict(enumerate(before)), dict(enumerate(after))
        return moved(whole.select(held), old, new, lengths, (here.dp_rank, RANKS), links.swap)

    found = on_simulated_ranks(world, in_world(world, move))
    for batch, held in zip(found, held_by(after, RANKS), strict=True):
        assert not differing_fields(batch, whole.select(held))
        assert batch.indices.tolist() == held
        assert batch.origin is None


@settings(max_examples=40, deadline=None)
@given(st.data(), worlds())
def test_every_rank_of_a_replica_is_given_its_trajectories_whoever_generated_them(data, world):
    """Of any layout of tensor, context, pipeline and data parallelism; a rank may have generated nothing."""
    answers = data.draw(batches(max_trajectories=8))
    whole = pack_answers(answers)
    producer_of = data.draw(assignments(len(answers), len(world)))
    rank_of = data.draw(assignments(len(answers), world[0].dp))
    table = table_of(whole.lengths, [a.trajectory.action_count for a in answers], rank_of)

    def give(here, links):
        own = [i for i, producer in enumerate(producer_of) if producer == here.rank]
        return deliver(pack_answers([answers[i] for i in own], own), producer_of, table, here, links)

    for here, batch in zip(world, on_simulated_ranks(world, in_world(world, give)), strict=True):
        held = [i for i, rank in enumerate(rank_of) if rank == here.dp_rank]
        assert batch.indices.tolist() == held
        assert not differing_fields(batch, whole.select(held))
        assert batch.origin is None


@given(worlds())
def test_each_rank_has_a_replica_and_a_number_of_its_own_in_it(world):
    named = {(there.dp_rank_of(there.rank), there.replica_rank_of(there.rank)) for there in world}
    assert named == {(replica, number) for replica in range(world[0].dp) for number in range(world[0].replica_size)}
    assert all(there.dp_rank_of(there.rank) == there.dp_rank for there in world)


def test_a_batch_that_has_every_field_has_what_any_pass_reads():
    """So that tests of moves and cuts leave none out."""
    batch = with_every_field(pack_answers([answer([0, 1])]))
    terms = ActorTerms(policy_loss("vanilla"), kl_loss_coef=0.1, kl_loss_type="full")
    read = {*PolicyObjective.reads(terms), *ValueObjective.reads, *ReferencePass.reads}
    assert terms.uses_full_kl and batch.prepared
    assert read - {"prepared"} <= batch.fields.keys()
