"""Moves trajectories between data-parallel ranks, and goes through shuffled epochs; runs on every rank."""

from dataclasses import replace

import torch.distributed as dist

from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import MicroBatchLimit, assign_ranks
from mppo.batch.packed import PackedBatch
from mppo.batch.table import LeftOut
from mppo.batch.trajectory import Status
from mppo.cli.compose import load_config
from mppo.config import ParallelConfig
from mppo.megatron import topology as layouts
from mppo.megatron.collectives import WIDTH, gather_from_all
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.trainer.batches import StepBatch, mini_batches_of_epoch
from mppo.trainer.redistribution import balanced_mini_batches, distribute, redistribute
from mppo.trainer.run_spec import RunSpec, UpdateSettings, make_run_spec
from mppo.weights.pretrained import open_model
from tests.distributed.hook_cases import LAYOUTS
from tests.unit.samples import answer, differing_fields, pack_answers, table_of, with_every_field

CASES = {"dp4": ParallelConfig()} | {name: LAYOUTS[name][1] for name in ("tp2-dp2", "pp2-dp2", "cp2-dp2")}
LENGTHS = [3, 9, 2, 17, 5, 5, 31, 2, 8, 13, 4, 6, 21, 3, 7, 11, 2]
COST = WorkloadModel(linear=1.0, attention=0.25)
MINI_BATCH, EPOCHS = 6, 3


class Place:
    """This rank of a layout, and what it must hold."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.answers = [answer([0] + [1] * (n - 1), index=i, score=float(i)) for i, n in enumerate(LENGTHS)]
        self.whole = with_every_field(pack_answers(self.answers), hidden=WIDTH + 3)

    def held(self, rank_of: list[int]) -> PackedBatch:
        """Only a last stage has hidden states."""
        mine = [index for index, rank in enumerate(rank_of) if rank == self.topology.dp_rank]
        batch = replace(self.whole.select(mine), origin=None)
        return batch if self.topology.is_last_stage else batch.with_fields(ref_hidden=None, old_hidden=None)

    def batch(self, rank_of: list[int]) -> StepBatch:
        return StepBatch(self.held(rank_of), table_of(LENGTHS, LENGTHS, rank_of), step=3, workload=COST)

    def differing(self, batch: StepBatch) -> list[str]:
        return differing_fields(batch.packed, self.held(batch.table.rank_of))

    def arrivals(self, spec: RunSpec, model: ModelConfig) -> list[str]:
        """Fields that are not what they should be after the trajectories of a step went from the ranks that generated
        them, some of them aborted, to those that train them."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mine = [one for i, one in enumerate(self.answers) if i * i % ranks == rank]
        aborted = answer([0, 1], index=len(LENGTHS) + rank, status=Status.ABORTED)
        batch = distribute([aborted, *reversed(mine)], spec, model, 3, self.topology)
        assert [s.uid for s in batch.table.summaries] == [one.trajectory.uid for one in self.answers]
        assert batch.table.left_out == LeftOut(aborted=ranks)
        held = [i for i, owner in enumerate(batch.table.rank_of) if owner == self.topology.dp_rank]
        return differing_fields(batch.packed, pack_answers([self.answers[i] for i in held], held))

    def moves(self) -> dict[str, list[str]]:
        """Fields that are not what they should be after each of a chain of moves."""
        count, dp = len(LENGTHS), self.topology.dp
        turns = [i % dp for i in range(count)]
        batch, found = self.batch(turns), {}
        for name, rank_of in {
            "all to one": [dp - 1] * count,
            "and to the next": [0] * count,
            "one to all": turns[::-1],
            "some": [dp - 1, *turns[::-1][1:]],
        }.items():
            batch = redistribute(batch, rank_of, self.topology)
            assert batch.table.rank_of == rank_of
            found[name] = self.differing(batch)
        assert redistribute(batch, list(batch.table.rank_of), self.topology) is batch
        return found

    def epochs(self) -> dict[str, float | list]:
        """Of a smaller mini-batch than the first assignment was for, over shuffled epochs.

        `excess`: by how much the ranks of a mini-batch differ over its heaviest trajectory, at most; `assignments`: how
        many there were; `differing`: fields that are not what they should be.
        """
        limit = MicroBatchLimit(trajectories=2)
        settings = UpdateSettings(MINI_BATCH, EPOCHS, True, limit, limit, "token-mean", 1.0)
        batch = self.batch(assign_ranks([list(range(len(LENGTHS)))], list(map(COST, LENGTHS)), self.topology.dp))
        excess, differing, assignments, steps = [], set(), set(), []
        for current, indices in balanced_mini_batches(batch, settings, 7, self.topology):
            loads = [0.0] * self.topology.dp
            for index in indices:
                loads[current.table.rank_of[index]] += COST(LENGTHS[index])
            excess.append(max(loads) - min(loads) - max(COST(LENGTHS[i]) for i in indices))
            differing.update(self.differing(current))
            assignments.add(tuple(current.table.rank_of))
            steps.append(indices)
        expected = [mini_batches_of_epoch(batch.table.prompts, settings, 7, 3, epoch) for epoch in range(EPOCHS)]
        assert steps == [indices for mini_batches in expected for indices in mini_batches]
        in_order = balanced_mini_batches(current, replace(settings, shuffle=False), 7, self.topology)
        assert len({id(b) for b, _ in in_order}) == 1  # nothing moves between epochs of the same mini-batches
        return {"excess": max(excess), "assignments": len(assignments), "differing": sorted(differing)}


def moves_and_epochs() -> dict[str, list[dict]]:
    """Of every layout, what `Place.arrivals`, `Place.moves` and `Place.epochs` found on each rank."""
    found, config = {}, load_config("class", ["trainer.total_training_steps=1"])
    model = open_model(config.model, seed=1).config
    for name, parallel in CASES.items():
        place = Place(layouts.initialize(parallel, seed=1))
        assert place.topology.dp_rank == place.topology.dp_rank_of(dist.get_rank())
        arrivals = place.arrivals(make_run_spec(config, place.topology.dp), model)
        found[name] = gather_from_all({"arrivals": arrivals, "moves": place.moves(), "epochs": place.epochs()})
        layouts.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
