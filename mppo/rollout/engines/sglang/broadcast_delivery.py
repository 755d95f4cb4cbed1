"""Whole tensors, brought to the first rank and from there to every worker of a server, in SGLang's own group."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.config import SglangConfig
from mppo.megatron import platform
from mppo.rollout.engines.sglang.board import Board
from mppo.rollout.engines.sglang.deliveries import Order, Refit
from mppo.rollout.engines.sglang.fleet import Member
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transfer_plan import HFTensor, Layout, whole_tensors
from mppo.weights.transports.point_to_point import PointToPoint
from mppo.weights.transports.worker_link import Traffic


class Broadcast:
    """Needs nothing of ours in the servers, and no table of their layout. Each worker receives the whole model."""

    in_session = True

    def __init__(self, config: SglangConfig, board: Board, dtype: torch.dtype):
        self.config, self.board, self.dtype = config, board, dtype
        self.transport = PointToPoint(config.buffer_mb << 20)
        self.buckets: list[Layout] = []
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.names: dict[int, str] = {}
        self.traffic = Traffic()

    async def prepare(self, weights: LiveWeights, refit: Refit) -> None:
        """See `Delivery`. Of its two copies of a bucket the first rank holds no more than the limit."""
        if not self.buckets:
            for tensors in _buckets(weights.layout.tensors, self.dtype, (self.config.buffer_mb << 20) // 2):
                names = {rank: list(tensors) if rank == 0 else [] for rank in weights.layout.holdings}
                self.buckets.append(whole_tensors(tensors, names, self.dtype))

    async def agree(self, member: Member, refit: Refit) -> None:
        self.names[member.number] = f"mppo-{refit.number}-{member.number}-{secrets.token_hex(8)}"

    async def send(self, weights: LiveWeights, orders: Sequence[Order], refit: Refit) -> Mapping[int, str]:
        """See `Delivery`."""
        faults: dict[int, str] = {}
        self.traffic = Traffic()
        if weights.rank == 0:
            joining = [order for order in orders if order.join]
            await asyncio.gather(*(self._guarded(faults, o, self._join, o) for o in joining))
        for bucket in self.buckets:
            flat = await asyncio.to_thread(self._bring, weights, bucket)
            if flat is not None:
                able = [order for order in orders if order.server not in faults]
                await asyncio.gather(*(self._guarded(faults, o, self._broadcast, o.server, flat) for o in able))
                entries = len(able) * flat.nbytes // self.dtype.itemsize
                self.traffic += Traffic(len(able) * flat.nbytes, entries, entries)
        return faults

    async def _guarded(self, faults: dict[int, str], order: Order, work: Any, *args: Any) -> None:
        try:
            await asyncio.to_thread(work, *args)
        except RuntimeError as error:  # torch has one error for all that connections meet
            faults[order.server] = f"the first rank could not broadcast to it: {str(error).splitlines()[0]}"
            self._leave(order.server)

    def _join(self, order: Order) -> None:
        """Under the prefixes that `init_custom_process_group` and torch's own helper give a group in the store."""
        self._leave(order.server)
        name = self.names[order.server]
        store = dist.PrefixStore(name, self.board.connection())
        store = dist.PrefixStore(f"{platform.device().type}/", dist.PrefixStore(f"{name}/", store))
        timeout = timedelta(seconds=self.config.update_timeout_s)
        workers = self.config.tensor_parallel_size
        self.groups[order.server] = platform.outside_group(store, 0, 1 + workers, timeout, self.board.host)

    def _bring(self, weights: LiveWeights, bucket: Layout) -> Tensor | None:
        """A bucket as bytes, on the first rank."""
        names = bucket.holdings[weights.rank].shapes
        tensors = {
            name: torch.empty(shape, dtype=self.dtype, device=platform.device()) for name, shape in names.items()
        }
        self.transport.run(weights.plan_for(bucket), weights, tensors)
        return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors.values()]) if tensors else None

    def _broadcast(self, server: int, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.groups[server].broadcast([flat], options).wait(timedelta(seconds=self.config.update_timeout_s))

    async def take(self, member: Member, order: Order, refit: Refit) -> None:
        """See `Delivery`."""
        client, name = member.client, self.names[member.number]
        if order.join:
            await client.succeed(
                "/init_weights_update_group",
                {
                    "master_address": self.board.host,
                    "master_port": self.board.port,
                    "rank_offset": 1,
                    "world_size": 1 + self.config.tensor_parallel_size,
                    "group_name": name,
                    "backend": "nccl" if platform.has_cuda() else "gloo",
                },
                timeout_s=self.config.update_timeout_s,
            )
        for bucket in self.buckets:
            shapes = bucket.holdings[0].shapes
            body = {
                "names": list(shapes),
                "dtypes": [str(self.dtype).removeprefix("torch.")] * len(shapes),
                "shapes": [list(shape) for shape in shapes.values()],
                "group_name": name,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            await client.succeed("/update_weights_from_distributed", body, timeout_s=self.config.update_timeout_s)

    def _leave(self, server: int) -> None:
        if server in self.groups:
            self.groups.pop(server).abort()

    def close(self) -> None:
        for server in list(self.groups):
            self._leave(server)


def _buckets(tensors: Mapping[str, HFTensor], dtype: torch.dtype, limit: int) -> list[dict[str, HFTensor]]:
    """In order, each of at most `limit` bytes in the type in which they travel, or of one tensor."""
    found: list[dict[str, HFTensor]] = []
    size = 0
    for name, tensor in tensors.items():
        own = tensor.bytes // tensor.dtype.itemsize * dtype.itemsize
        if not found or size + own > limit:
            found.append({})
            size = 0
        found[-1][name] = tensor
        size += own
    return found
