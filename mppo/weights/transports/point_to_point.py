"""Slices from rank to rank of the trainer, over torch.distributed (gloo or NCCL)."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.errors import ModelError
from mppo.megatron import platform
from mppo.megatron.collectives import fail_together
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transfer_plan import Plan, Send

BUCKET_BYTES = 256 << 20


class PointToPoint:
    """Executes plans whose holders are ranks of the world.

    What a rank holds itself it copies. The rest goes in rounds in which no rank sends or receives more than
    `bucket_bytes`, as one message for each pair of ranks (and type) in a round. Every rank goes through the same rounds
    of the same plan, and posts all its messages of a round before it waits for any, so none waits for ever.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES):
        self.bucket_bytes = bucket_bytes
        self._rounds: WeakKeyDictionary[Plan, list[list[Send]]] = WeakKeyDictionary()

    @torch.no_grad()
    def run(self, plan: Plan, weights: LiveWeights, targets: Mapping[str, Tensor]) -> None:
        """Write what the plan has for this rank into its `targets`, converted to their types. Collective.

        Raises ModelError, on every rank and before anything moves, for a target that is missing or too small.
        """
        alone = all(send.is_local for send in plan.sends)
        with nullcontext() if alone else fail_together():
            _check(plan, weights, targets)
        for send in plan.sends:
            if send.is_local and send.target == weights.rank:
                send.write.view(targets).copy_(send.read.view(weights.tensors))
        for sends in self._rounds_of(plan, weights.rank):
            self._exchange(sends, weights, targets)

    def _rounds_of(self, plan: Plan, rank: int) -> list[list[Send]]:
        """Those in which this rank has a part, and its part of them; made once for a plan."""
        if plan not in self._rounds:
            mine = ([s for s in sends if rank in (s.source, s.target)] for sends in plan.rounds(self.bucket_bytes))
            self._rounds[plan] = [sends for sends in mine if sends]
        return self._rounds[plan]

    @staticmethod
    def _exchange(sends: list[Send], weights: LiveWeights, targets: Mapping[str, Tensor]) -> None:
        """One round: a flat buffer for every peer and type, then all messages together."""
        outgoing = _grouped((send.target, send) for send in sends if send.source == weights.rank)
        incoming = _grouped((send.source, send) for send in sends if send.target == weights.rank)
        buffers = {
            key: torch.empty(sum(map(_entries, group)), dtype=key[1], device=platform.device())
            for key, group in incoming.items()
        }
        messages = [dist.P2POp(dist.irecv, buffer, peer) for (peer, _), buffer in buffers.items()]
        for (peer, dtype), group in outgoing.items():
            flat = torch.cat([send.read.view(weights.tensors).reshape(-1).to(dtype) for send in group])
            messages.append(dist.P2POp(dist.isend, flat.to(platform.device()), peer))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for key, group in incoming.items():
            for send, flat in zip(group, buffers[key].split(list(map(_entries, group))), strict=True):
                send.write.view(targets).copy_(flat.view(send.shape))


def _entries(send: Send) -> int:
    return send.bytes // send.dtype.itemsize


def _grouped(sends: Iterable[tuple[int, Send]]) -> dict[tuple[int, torch.dtype], list[Send]]:
    """By peer and type, in the order of the plan, which is that of the other side too."""
    groups: dict[tuple[int, torch.dtype], list[Send]] = {}
    for peer, send in sends:
        groups.setdefault((peer, send.dtype), []).append(send)
    return groups


def _check(plan: Plan, weights: LiveWeights, targets: Mapping[str, Tensor]) -> None:
    """What would fail on this rank alone, while the others wait for it."""
    for send in plan.sends:
        if send.target != weights.rank:
            continue
        if send.write.name not in targets:
            raise ModelError(f"rank {weights.rank} has no tensor {send.write.name} to take weights into")
        target = targets[send.write.name]
        shape = target.shape if send.write.index is None else target.shape[1:]
        fits = len(shape) == len(send.shape) and send.write.stop <= shape[send.write.dim]
        others = [size for dim, size in enumerate(shape) if dim != send.write.dim]
        if not fits or others != [size for dim, size in enumerate(send.shape) if dim != send.write.dim]:
            raise ModelError(
                f"rank {weights.rank}: {send.write.name} is {list(target.shape)}, too small or of another shape for"
                f" {send.write} of {send.hf.name}"
            )
