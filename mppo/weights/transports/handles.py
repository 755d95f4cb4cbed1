"""Buffers that are handed over within a machine: the other process opens the same memory.

For servers that share the trainer's GPUs, between which NCCL makes no connections. On CUDA over IPC handles (unproven:
never run on a GPU); on the host over shared memory, by which the tests prove the protocol.
"""

import base64
import io
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
import torch.multiprocessing  # noqa: F401  (teaches the pickler tensors)
from torch import Tensor


class Handles:
    """Sends as a process group does, and keeps each buffer until the other end has taken what is in it."""

    def __init__(self, store: dist.Store, rank: int):
        self.store, self.rank, self._sent = store, rank, dict[int, int]()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> "Taken":
        """Of one tensor."""
        number = self._sent[to] = self._sent.get(to, -1) + 1
        key, handle = f"{self.rank}>{to}/{number}", io.BytesIO()
        if tensors[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        ForkingPickler(handle).dump(tensors[0])
        self.store.set(key, base64.b64encode(handle.getvalue()).decode())
        return Taken(self.store, key, tensors[0])

    def abort(self) -> None:
        """Nothing is open: who waits for a buffer that does not come has a deadline."""


class Taken:
    """What `dist.Work` is to a message."""

    def __init__(self, store: dist.Store, key: str, buffer: Tensor):
        self.store, self.key, self.buffer = store, key, buffer

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError when it is not taken in time."""
        self.store.wait([f"{self.key}/taken"], timeout)
        self.store.delete_key(f"{self.key}/taken")
        self.store.delete_key(self.key)
