"""Actor, critic and reference: model chunks, what they compute forward, and how they are updated."""

import torch
from torch import Tensor

from mppo.algorithm.statistics import Ratio, add_up
from mppo.batch.plan import MicroBatchLimit
from mppo.config import OptimConfig
from mppo.megatron import platform
from mppo.megatron.collectives import from_last_stage, reduce_statistics
from mppo.megatron.model import wrap_for_training
from mppo.megatron.objectives import ForwardPass
from mppo.megatron.optimizer import Optimizer
from mppo.megatron.schedule import Objective, run_schedule
from mppo.megatron.topology import Topology
from mppo.trainer.batches import MiniBatch, StepBatch, micro_batches


class Role:
    """Model chunks that can be run forward."""

    def __init__(self, chunks: list[torch.nn.Module], topology: Topology):
        self.chunks, self.topology = chunks, topology

    def forward(self, batch: StepBatch, limit: MicroBatchLimit, closure: ForwardPass) -> dict[str, Tensor]:
        """Run this replica's trajectories through the schedule.

        Returns `[T]` float32 vectors, 0 outside the actions, on every pipeline stage.
        """
        pieces = micro_batches(batch, list(range(len(batch.table))), limit, self.topology)
        outputs = run_schedule(self.chunks, pieces, closure, forward_only=True)
        like = torch.zeros(len(batch.packed))
        gathered = {}
        for name in closure.names:
            local = batch.packed.gather_back([o["origin"] for o in outputs], [o[name] for o in outputs])
            gathered[name] = from_last_stage(local, like, self.topology)
        return gathered


class ReferenceRole(Role):
    """The frozen reference. With placement `host` it is on the device only during its pass."""

    def __init__(self, chunks: list[torch.nn.Module], topology: Topology, placement: str):
        super().__init__(chunks, topology)
        self.placement = placement
        for chunk in chunks:
            chunk.requires_grad_(False)
        self._rest()

    def forward(self, batch: StepBatch, limit: MicroBatchLimit, closure: ForwardPass) -> dict[str, Tensor]:
        for chunk in self.chunks:
            chunk.to(platform.device())
        result = super().forward(batch, limit, closure)
        self._rest()
        return result

    def _rest(self) -> None:
        if self.placement == "host":
            for chunk in self.chunks:
                chunk.to("cpu")


class TrainableRole(Role):
    """A role with gradients and an optimizer."""

    def __init__(self, chunks: list[torch.nn.Module], topology: Topology, optim: OptimConfig, dtype: torch.dtype):
        super().__init__(wrap_for_training(chunks, optim.use_distributed_optimizer), topology)
        self.optimizer = Optimizer(self.chunks, optim, dtype)

    def update(self, mini_batch: MiniBatch, objective: Objective) -> tuple[dict[str, Ratio], dict[str, float]]:
        """One optimizer step: zero, forward and backward of all micro-batches, step.

        Returns metrics over the global mini-batch, and the gradient norm and learning rate. Raises TrainingError, on
        every rank, when the gradient is not finite.
        """
        self.optimizer.zero_grad()
        statistics = run_schedule(self.chunks, mini_batch.micro_batches, objective)
        return reduce_statistics(add_up(statistics), self.topology), self.optimizer.step()
