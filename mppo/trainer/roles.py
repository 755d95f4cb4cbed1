"""Actor, critic and reference: model chunks, what they compute forward, and how they are updated."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from mppo.algorithm.statistics import Statistics, add_up
from mppo.batch.batch_plan import MicroBatchLimit
from mppo.config import OptimConfig
from mppo.errors import TrainingError, alike_on_every_rank
from mppo.megatron.collectives import from_last_stage, gather_from_all, join_slices, reduce_statistics
from mppo.megatron.model import wrap_for_training
from mppo.megatron.objectives import ForwardPass, Objective
from mppo.megatron.offload import OffloadedTensors, gradients_of, optimizer_state_of, weights_of
from mppo.megatron.optimizer import Optimizer
from mppo.megatron.output_layer import output_weight
from mppo.megatron.rescued_role import rescue_role, take_up_role
from mppo.megatron.role_checkpoint import load_role, save_role
from mppo.megatron.router import take_balance_loss
from mppo.megatron.schedule import run_schedule
from mppo.megatron.topology import Topology
from mppo.trainer.batches import MiniBatch, StepBatch, context_part, micro_batches


@dataclass(frozen=True)
class Update:
    """What is known of an optimizer step."""

    statistics: Statistics
    """Over the global mini-batch."""
    numbers: dict[str, float]
    """The gradient norm, the learning rate and, where it is on, the load-balancing loss."""


class Role:
    """Model chunks that can be run forward. With placement `host` they are on the device only while they are used."""

    def __init__(self, chunks: list[torch.nn.Module], topology: Topology, placement: str):
        self.chunks, self.topology, self.placement = chunks, topology, placement
        self.weights = OffloadedTensors(partial(weights_of, chunks))
        if placement == "host":
            self.weights.offload()

    def onloaded_weights(self) -> AbstractContextManager:
        """The weights are on the device inside, to be read. An export, which reads them without a forward pass, runs
        inside it."""
        return self.weights.onloaded(writes=False) if self.placement == "host" else nullcontext()

    def forward(
        self, batch: StepBatch, limit: MicroBatchLimit, closure: ForwardPass, indices: list[int] | None = None
    ) -> dict[str, Tensor | None]:
        """Run this replica's part of the trajectories `indices` (None: of all) through the schedule.

        Returns `[T]` float32 vectors, 0 outside the actions, on every pipeline stage; hidden states `[T, H]` stay on
        the last one, and are None elsewhere.
        """
        indices = list(range(len(batch.table))) if indices is None else indices
        pieces = [
            context_part(piece, self.topology)
            for piece in micro_batches(batch, indices, limit, self.topology, closure.reads)
        ]
        with self.onloaded_weights():
            outputs = run_schedule(self.chunks, pieces, closure, forward_only=True)
        like = torch.zeros(len(batch.packed))
        gathered: dict[str, Tensor | None] = {}
        for name in closure.names:
            local = batch.packed.gather_back([o["origin"] for o in outputs], [o[name] for o in outputs])
            if self.topology.is_last_stage:
                local = join_slices(local, self.topology)
            if name == "hidden":
                gathered[name] = local if self.topology.is_last_stage else None
            else:
                gathered[name] = from_last_stage(local, like, self.topology)
        return gathered

    def output_weight(self) -> Tensor | None:
        """`[V/tp, H]`: a copy of this rank's rows of the output projection; None but on the last stage."""
        if not self.topology.is_last_stage:
            return None
        with self.onloaded_weights():
            return output_weight(self.chunks[-1]).detach().clone()


class ReferenceRole(Role):
    """The frozen reference."""

    def __init__(self, chunks: list[torch.nn.Module], topology: Topology, placement: str):
        for chunk in chunks:
            chunk.requires_grad_(False)
        super().__init__(chunks, topology, placement)


class TrainableRole(Role):
    """A role with gradients and an optimizer."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        topology: Topology,
        optim: OptimConfig,
        dtype: torch.dtype,
        placement: str = "device",
    ):
        wrapped = wrap_for_training(chunks, optim)
        self.optimizer = Optimizer(wrapped, optim, dtype)
        self.gathered_late = wrapped if optim.overlap_param_gather else []
        """Chunks whose parameters are gathered while the next forward pass has begun."""
        self.state = OffloadedTensors(partial(optimizer_state_of, self.optimizer.megatron))
        self.gradients = OffloadedTensors(partial(gradients_of, wrapped), keep=False)
        super().__init__(wrapped, topology, placement)
        self.offloaded = [self.weights, self.state, self.gradients] if placement == "host" else []
        if optim.state_placement == "host" and not self.offloaded:
            self.offloaded = [self.state]
        for offloaded in self.offloaded:
            offloaded.offload()

    @contextmanager
    def onloaded(self, *, writes: bool = True) -> Iterator[None]:
        """Weights, gradients and optimizer state are on the device inside; afterwards all parameters are gathered.

        Without `writes` they are only read, and not copied back to the host.
        """
        with ExitStack() as stack:
            for offloaded in self.offloaded:
                stack.enter_context(offloaded.onloaded(writes=writes))
            yield
            for chunk in self.gathered_late:
                chunk.start_param_sync(force_sync=True)

    def save(self, folder: Path) -> None:
        """Collective: weights, optimizer and learning-rate schedule into a folder that is there and empty."""
        with self.onloaded(writes=False):
            save_role(self.chunks, self.optimizer, folder)

    def load(self, folder: Path) -> None:
        """Collective: what a role of the same model saved, under any layout and with any optimizer."""
        with self.onloaded():
            load_role(self.chunks, self.optimizer, folder)

    def rescue(self, file: Path) -> int:
        """What this rank holds, without asking others; returns the number of updates so far."""
        with self.onloaded(writes=False):
            rescue_role(self.chunks, self.optimizer, file)
        return self.optimizer.steps

    def take_up(self, file: Path) -> None:
        """What this rank rescued, under the same layout and optimizer."""
        with self.onloaded():
            take_up_role(self.chunks, self.optimizer, file)

    def update(
        self, mini_batch: MiniBatch, objective: Objective, meanwhile: Callable[[], None] = lambda: None
    ) -> Update:
        """One optimizer step, inside `onloaded`: zero, forward and backward of all micro-batches, step.

        `meanwhile` is called while a GPU is still at work on it: the host waits for the device once before the step,
        for the gradient norm, and once after it, for the metrics. Raises TrainingError, on every rank and before the
        step, when a token loss or the gradient is not finite.
        """
        self.optimizer.zero_grad()
        statistics = run_schedule(self.chunks, mini_batch.micro_batches, objective)
        balance_loss = take_balance_loss(self.chunks)
        meanwhile()
        try:
            numbers = self.optimizer.step()
        except TrainingError:
            self._name_non_finite_losses(objective)
            raise
        metrics = reduce_statistics(add_up(statistics), self.topology)
        if get_model_config(self.chunks[0]).moe_aux_loss_coeff:
            numbers["balance_loss"] = sum(gather_from_all(balance_loss.item())) / mini_batch.total_tokens
        return Update(metrics, numbers)

    def _name_non_finite_losses(self, objective: Objective) -> None:
        """Raise TrainingError, on every rank, if it was the losses. Collective."""
        holds = self.topology.is_last_stage and self.topology.tp_rank == 0
        found = Counter[int]()
        for tokens in gather_from_all(objective.offenders.tokens() if holds else {}):
            found.update(tokens)
        if not found:
            return
        shown = ", ".join(map(str, sorted(found)[:8])) + (", ..." if len(found) > 8 else "")
        with alike_on_every_rank():
            raise TrainingError(
                f"{objective.name} is not finite for {found.total()} tokens of the mini-batch, in trajectories {shown};"
                " no step was made"
            )
