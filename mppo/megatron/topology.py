"""Parallel sizes: checked against the world and the model, then given to Megatron-core."""

import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mppo.config import ParallelConfig
from mppo.errors import ConfigError
from mppo.megatron import platform
from mppo.megatron.model_config import ModelConfig


@dataclass(frozen=True)
class Topology:
    """The layout of this run and this process's place in it."""

    tp: int
    pp: int
    vpp: int | None
    cp: int
    dp: int
    sequence_parallel: bool
    rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int

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

    def padded_length(self, length: int) -> int:
        """Tokens that a trajectory takes up on all context-parallel ranks together."""
        return length if self.cp == 1 else -(-length // (2 * self.cp)) * 2 * self.cp

    def token_budget(self, per_rank: int) -> int:
        """Padded tokens that a micro-batch may have on all context-parallel ranks together, padding of the slices
        to `token_multiple` included."""
        return self.cp * (per_rank - per_rank % self.token_multiple)


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """DP = world / (TP x PP x CP). Raises ConfigError that says which numbers do not fit."""
    model_parallel = (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )
    if world_size % model_parallel:
        raise ConfigError(
            f"{world_size} processes cannot be cut into TP {parallel.tensor_model_parallel_size}"
            f" x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} = {model_parallel}:"
            f" start a multiple of {model_parallel} processes (torchrun --nproc-per-node), or lower"
            " parallel.tensor_model_parallel_size or parallel.pipeline_model_parallel_size"
        )
    return world_size // model_parallel


def check_layout(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Raise ConfigError, naming the number to change, when the model cannot be cut as `parallel` says."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    stages = pp * (parallel.virtual_pipeline_model_parallel_size or 1)
    for number, what in (
        (model.num_attention_heads, "attention heads"),
        (model.num_query_groups, "key/value heads"),
        (model.ffn_hidden_size, "feed-forward columns"),
    ):
        if number % tp:
            fits = [n for n in range(1, tp + 1) if number % n == 0]
            raise ConfigError(
                f"parallel.tensor_model_parallel_size={tp} does not divide the model's {number} {what}; use {fits[-1]}"
            )
    if model.num_layers % stages:
        fits = [n for n in range(1, model.num_layers + 1) if model.num_layers % n == 0 and n <= stages]
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={pp} x virtual_pipeline_model_parallel_size="
            f"{parallel.virtual_pipeline_model_parallel_size or 1} does not divide the model's {model.num_layers}"
            f" layers; the nearest number of stages that does is {fits[-1]}"
        )
    if parallel.expert_model_parallel_size > 1:
        raise ConfigError(
            f"parallel.expert_model_parallel_size={parallel.expert_model_parallel_size}: the model is dense; use 1"
        )


def initialize(parallel: ParallelConfig, seed: int) -> Topology:
    """Join the process group that torchrun describes and let Megatron-core make its groups."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ConfigError("training runs under torchrun: torchrun --nproc-per-node N -m mppo train ...")
        platform.bind_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(platform.backend(), timeout=timedelta(minutes=parallel.timeout_minutes))
    data_parallel_size(parallel, dist.get_world_size())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            distributed_timeout_minutes=parallel.timeout_minutes,
        )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Topology(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        dp=parallel_state.get_data_parallel_world_size(),
        sequence_parallel=parallel.sequence_parallel,
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def shutdown() -> None:
    """Leave the process groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
