"""What planning a training step costs one rank, at any number of ranks: the control plane, simulated in one process.

The first rank's part is run for real: it describes what it generated, reads the descriptions of all others, plans,
exchanges trajectories, cuts the micro-batches of the anchor's pass and of an epoch, and works out metrics. What other
ranks would send is made beforehand and not timed; the network's own time is left out, its bytes are counted. The number
of collectives does not depend on the number of ranks. The global batch is the same at every size, so that more ranks
each hold less of it. Later epochs, where they are shuffled, plan and exchange again.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import by_rank
from mppo.batch.packed import pack
from mppo.batch.trajectory import Trajectory
from mppo.config import ParallelConfig
from mppo.megatron.collectives import from_bytes, to_bytes
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Sizes, Topology, data_parallel_size
from mppo.planning.estimate.lengths import Length
from mppo.trainer.batches import (
    StepBatch,
    TrajectorySummary,
    TrajectoryTable,
    check_budgets,
    cut_mini_batch,
    for_rank,
    micro_batches,
    mini_batches_of_epoch,
    tabulate,
)
from mppo.trainer.metrics import trajectory_metrics
from mppo.trainer.run_spec import Anchor, RunSpec

REPEATS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """Of the first rank, in a training step with one epoch."""

    gather: float
    """The lines of every rank out of bytes."""
    plan: float
    """Mini-batches, the data-parallel rank of each trajectory, and whether each fits a micro-batch."""
    metrics: float
    """Of the table: what every rank knows of the whole batch."""
    serialize: float
    """What it generated, as lines of the table, into bytes."""
    exchange: float
    """Trajectories into bytes, and those that come here out of them, packed."""
    micro_batches: float
    """Of the anchor's pass, where there is one, and of every mini-batch, with the weights of their tokens."""

    @property
    def of_the_batch(self) -> float:
        """What follows from the whole batch, and is the same on every rank."""
        return self.gather + self.plan + self.metrics

    @property
    def of_its_share(self) -> float:
        """What follows from the trajectories that this rank generated, or trains."""
        return self.serialize + self.exchange + self.micro_batches


@dataclass(frozen=True)
class ControlPlane:
    """Of one rank, at one number of ranks."""

    ranks: int
    data_parallel: int
    seconds: Seconds
    bytes_gathered: int
    """Lines of all trajectories."""
    bytes_received: int
    """Trajectories that this rank will train."""


@dataclass(frozen=True)
class _World:
    """The batch of a training step, and who generated what of it."""

    lengths: list[Length]
    answers: int
    """Trajectories of one prompt."""
    ranks: int
    topology: Topology

    def trajectory(self, index: int) -> Trajectory:
        length = self.lengths[index]
        zeros = torch.zeros(length.total)
        mask = torch.arange(length.total) >= length.prompt
        return Trajectory(index, index // self.answers, zeros.long(), mask, zeros, reward=float(index % 2))

    def generated_by(self, rank: int) -> list[Trajectory]:
        return [self.trajectory(index) for index in range(rank, len(self.lengths), self.ranks)]

    def lines_of(self, rank: int) -> Tensor:
        return to_bytes([TrajectorySummary.of(t) for t in self.generated_by(rank)])

    def payloads(self, rank_of: list[int]) -> list[Tensor]:
        """What comes to the first rank, from each rank."""
        mine = [[] for _ in range(self.ranks)]
        for index, owner in enumerate(rank_of):
            if owner == 0:
                mine[index % self.ranks].append(self.trajectory(index))
        return [to_bytes(items) for items in mine]


def simulate(spec: RunSpec, model: ModelConfig, lengths: list[Length], ranks: int) -> ControlPlane:
    """A training step of the configuration with trajectories of these lengths, on `ranks` ranks.

    Raises ConfigError for a number of ranks that the layout does not divide, and DataError that names a trajectory over
    the token budget of a micro-batch.
    """
    parallel = spec.config.parallel
    world = _World(lengths, spec.config.rollout.n, ranks, _first_rank(parallel, data_parallel_size(parallel, ranks)))
    lines = [world.lines_of(rank) for rank in range(ranks)]
    table, _ = _plan([line for payload in lines for line in from_bytes(payload)], world, spec, model)
    payloads, own = world.payloads(table.rank_of), world.generated_by(0)
    runs = [_run(world, spec, model, lines, payloads, own) for _ in range(REPEATS)]
    seconds = Seconds(*(median(getattr(run, field.name) for run in runs) for field in fields(Seconds)))
    return ControlPlane(ranks, world.topology.dp, seconds, sum(map(len, lines)), sum(map(len, payloads)))


def _run(
    world: _World,
    spec: RunSpec,
    model: ModelConfig,
    line_parcels: list[Tensor],
    payloads: list[Tensor],
    own: list[Trajectory],
) -> Seconds:
    """The steps of `balance` and of an epoch of updates, one after another."""
    topology = world.topology
    serialized, _ = _timed(lambda: to_bytes([TrajectorySummary.of(t) for t in own]))
    gathered, lines = _timed(lambda: [line for payload in line_parcels for line in from_bytes(payload)])
    planned, (table, cost) = _timed(lambda: _plan(lines, world, spec, model))

    def exchange() -> StepBatch:
        outgoing = by_rank(own, [table.rank_of[t.index] for t in own], topology.dp)
        packed = [to_bytes(part) for part in outgoing]
        torch.cat([packed[topology.dp_rank_of(rank)] for rank in range(world.ranks)])
        mine = [t for payload in payloads for t in from_bytes(payload)]
        return StepBatch(pack(sorted(mine, key=lambda t: t.index)), table, 0, cost)

    exchanged, batch = _timed(exchange)
    cut, _ = _timed(lambda: _cut(batch, spec, topology))
    metrics, _ = _timed(lambda: trajectory_metrics(table))
    return Seconds(gathered, planned, metrics, serialized, exchanged, cut)


def _plan(
    lines: list[TrajectorySummary], world: _World, spec: RunSpec, model: ModelConfig
) -> tuple[TrajectoryTable, WorkloadModel]:
    table, cost = tabulate(lines, _mini_batches(len(lines), spec), model, world.topology.dp)
    check_budgets(table, spec.actor.limits, world.topology)
    return table, cost


def _cut(batch: StepBatch, spec: RunSpec, topology: Topology) -> None:
    if spec.anchor(len(batch.table)) is Anchor.OWN_PASS:
        for piece in micro_batches(batch, list(range(len(batch.table))), spec.actor.infer_limit, topology):
            for_rank(piece, topology)
    for indices in _mini_batches(len(batch.table), spec):
        cut_mini_batch(batch, indices, spec.actor, topology)


def _mini_batches(count: int, spec: RunSpec) -> list[list[int]]:
    return mini_batches_of_epoch(count, spec.actor, spec.config.trainer.seed, step=0, epoch=0)


def _first_rank(parallel: ParallelConfig, dp: int) -> Topology:
    """Without process groups: nothing that is timed asks for them."""
    places = ("rank", "tp_rank", "cp_rank", "pp_rank", "dp_rank", "ep_rank", "etp_rank")
    return Topology(**vars(Sizes.of(parallel, dp)), **dict.fromkeys(places, 0))


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    start = perf_counter()
    result = run()
    return perf_counter() - start, result


def print_control_plane(found: list[ControlPlane], trajectories: int, console: Console) -> None:
    """A column for each number of ranks."""
    table = Table(title=f"planning a training step of {trajectories:,} trajectories, on one rank (ms)")
    table.add_column("ranks")
    for size in found:
        table.add_column(f"{size.ranks:,}", justify="right")
    table.add_row("data-parallel ranks", *(str(size.data_parallel) for size in found), end_section=True)
    for name in ("gather", "plan", "metrics", "of_the_batch", "serialize", "exchange", "micro_batches", "of_its_share"):
        milliseconds = [1e3 * getattr(size.seconds, name) for size in found]
        table.add_row(name.replace("_", " "), *(f"{x:.1f}" for x in milliseconds), end_section=name.startswith("of"))
    table.add_row("MB gathered", *(f"{size.bytes_gathered / 1e6:.2f}" for size in found))
    table.add_row("MB received", *(f"{size.bytes_received / 1e6:.2f}" for size in found))
    console.print(table)
