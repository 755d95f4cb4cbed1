"""Parallel sizes: checked against the world and the model, then given to Megatron-core."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mppo.batch.batch_plan import MicroBatchLimit, ReplicaLimit
from mppo.config import ParallelConfig
from mppo.errors import ConfigError
from mppo.megatron import platform
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.stage_layers import layers_of_stages


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks, and what they ask of the tokens of a micro-batch."""

    tp: int
    pp: int
    vpp: int | None
    cp: int
    dp: int
    ep: int
    etp: int
    """Tensor-parallel ranks over which each expert is cut."""
    sequence_parallel: bool

    @classmethod
    def of(cls, parallel: ParallelConfig, dp: int) -> "Sizes":
        """Of a configuration, on `dp` data-parallel ranks."""
        return cls(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            vpp=parallel.virtual_pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            dp=dp,
            ep=parallel.expert_model_parallel_size,
            etp=parallel.expert_tensor_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
        )

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this (interleaved schedules go round by groups)."""
        return self.pp if self.vpp else 1

    @property
    def token_multiple(self) -> int:
        """The tokens of a rank's slice of a micro-batch must be a multiple of this.

        Sequence parallelism cuts them evenly; under context parallelism there are two chunks of each trajectory.
        """
        chunks = 2 if self.cp > 1 else 1
        return math.lcm(chunks, self.tp) if self.sequence_parallel else chunks

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank of a rank of the world; Megatron counts tensor, context, data, pipeline."""
        return rank // (self.tp * self.cp) % self.dp

    @property
    def replica_size(self) -> int:
        """Ranks that train the same trajectories: those of one replica of the model."""
        return self.tp * self.cp * self.pp

    def replica_rank_of(self, rank: int) -> int:
        """The number of a rank of the world among the ranks of its replica."""
        inner = self.tp * self.cp
        return rank // (inner * self.dp) * inner + rank % inner

    def padded_length(self, length: int) -> int:
        """Tokens that a trajectory takes up on all context-parallel ranks together."""
        return length if self.cp == 1 else -(-length // (2 * self.cp)) * 2 * self.cp

    def replica_limit(self, limit: MicroBatchLimit) -> ReplicaLimit:
        """What a micro-batch may hold on all context-parallel ranks together, given what it may on one GPU."""
        return limit.of_replica(self.cp, self.token_multiple)


@dataclass(frozen=True)
class Topology(Sizes):
    """The layout of a role and this process's place in it. Roles share all but `vpp` and `sequence_parallel`."""

    rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    replica_group: dist.ProcessGroup | None = None
    """The ranks of this process's replica, in order; None where there are no process groups."""

    @property
    def replica_rank(self) -> int:
        """This process's number among the ranks of its replica."""
        return self.replica_rank_of(self.rank)

    def of_role(self, parallel: ParallelConfig) -> "Topology":
        """The same place, in a role with the same process groups."""
        return replace(
            self,
            vpp=parallel.virtual_pipeline_model_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
        )

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that hold different experts of the same layers."""
        return parallel_state.get_expert_model_parallel_group()

    @property
    def etp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_expert_tensor_parallel_group()

    @property
    def dp_cp_group(self) -> dist.ProcessGroup:
        """All ranks that hold a part of the tokens of a mini-batch."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage of this process's pipeline."""
        return parallel_state.get_pipeline_model_parallel_last_rank()


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """DP = world / (TP x PP x CP). Raises ConfigError that says which numbers do not fit.

    Experts are dealt out to ranks of one pipeline stage, so their number of ranks divides the other sizes' product.
    """
    model_parallel = parallel.model_parallel_size
    if world_size % model_parallel:
        raise ConfigError(
            f"{world_size} processes cannot be cut into TP {parallel.tensor_model_parallel_size}"
            f" x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} = {model_parallel}:"
            f" start a multiple of {model_parallel} processes (torchrun --nproc-per-node), or lower"
            " parallel.tensor_model_parallel_size or parallel.pipeline_model_parallel_size"
        )
    stage, ep = world_size // parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    if stage % ep:
        raise ConfigError(
            f"parallel.expert_model_parallel_size={ep} does not divide TP x CP x DP = {stage}, the {world_size}"
            f" processes over PP {parallel.pipeline_model_parallel_size}; use {_nearest(ep, stage)}"
        )
    return world_size // model_parallel


def check_layout(
    parallel: ParallelConfig, model: ModelConfig, critic: tuple[ParallelConfig, ModelConfig] | None = None
) -> None:
    """Raise ConfigError, naming the number to change, when a model cannot be cut as its layout says.

    `critic` is the critic's layout and model, where there is one; it has the process groups of `parallel`.
    """
    ep, models = parallel.expert_model_parallel_size, [model] + ([critic[1]] if critic else [])
    if ep > 1 and all(m.num_experts is None for m in models):
        dense = "the model is" if critic is None else "actor and critic are"
        raise ConfigError(f"parallel.expert_model_parallel_size={ep}: {dense} dense; use 1")
    _check_cuts(parallel, model, "model", "parallel")
    if critic is not None:
        _check_cuts(*critic, "critic", "critic.parallel")


def _check_cuts(parallel: ParallelConfig, model: ModelConfig, role: str, field: str) -> None:
    """`field` is where the role's own part of the layout is set."""
    tp = parallel.tensor_model_parallel_size
    if model.num_experts is not None:
        _check_experts(parallel, model.num_experts, role, field)
    for number, ranks, what in (
        (model.num_attention_heads, tp, "attention heads"),
        (model.num_query_groups, tp, "key/value heads"),
        _feed_forward(parallel, model),
    ):
        if number % ranks:
            raise ConfigError(
                f"parallel.tensor_model_parallel_size={tp} does not divide the {role}'s {number} {what};"
                f" use {_nearest(tp, number)}"
            )
    layers_of_stages(model, parallel, role, field)


def _feed_forward(parallel: ParallelConfig, model: ModelConfig) -> tuple[int, int, str]:
    """What is cut of a feed-forward layer, by how many ranks, and its name."""
    if model.num_experts is None:
        return model.ffn_hidden_size, parallel.tensor_model_parallel_size, "feed-forward columns"
    return model.moe_ffn_hidden_size, parallel.expert_tensor_parallel_size, "feed-forward columns of an expert"


def _check_experts(parallel: ParallelConfig, experts: int, role: str, field: str) -> None:
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    if experts % ep:
        raise ConfigError(
            f"parallel.expert_model_parallel_size={ep} does not divide the {role}'s {experts} experts;"
            f" use {_nearest(ep, experts)}"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size={tp}: Megatron-core trains a mixture of experts under tensor"
            f" parallelism with sequence parallelism only; set {field}.sequence_parallel=true"
        )


def _nearest(size: int, number: int) -> int:
    """The largest divisor of `number` that is not above `size`."""
    return next(n for n in range(size, 0, -1) if number % n == 0)


def initialize(parallel: ParallelConfig, seed: int) -> Topology:
    """Join the process group that torchrun describes and let Megatron-core make its groups."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ConfigError("training runs under torchrun: torchrun --nproc-per-node N -m mppo train ...")
        platform.bind_device(int(os.environ["LOCAL_RANK"]))
        timeout = timedelta(minutes=parallel.timeout_minutes)
        dist.init_process_group(platform.backend(), timeout=timeout, device_id=platform.own_gpu())
    data_parallel_size(parallel, dist.get_world_size())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=parallel.timeout_minutes,
            # Every group has gloo for the host's tensors already. Groups of gloo alone would hang beside a `device_id`:
            # NCCL splits its communicator for a new group, and waits for those that make one without it.
            create_gloo_process_groups=False,
        )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    sizes = Sizes.of(parallel, parallel_state.get_data_parallel_world_size())
    return Topology(
        **vars(sizes),
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        replica_group=_replica_group(sizes),
    )


def _replica_group(sizes: Sizes) -> dist.ProcessGroup:
    """Of this process; Megatron-core has no group of all ranks of a replica. Collective over the world."""
    ranks = range(dist.get_world_size())
    replicas = [[rank for rank in ranks if sizes.dp_rank_of(rank) == dp_rank] for dp_rank in range(sizes.dp)]
    group, _ = dist.new_subgroups_by_enumeration(replicas)
    return group


@contextmanager
def virtual_pipeline(size: int | None) -> Iterator[None]:
    """Megatron-core's own state says inside that a pipeline stage has `size` model chunks (None: it is one).

    Building a model, running a schedule and saving a model read it there; all else reads it from the configuration of
    the chunks.
    """
    outside = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_virtual_pipeline_model_parallel_world_size(size)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(outside)


def shutdown() -> None:
    """Leave the process groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
