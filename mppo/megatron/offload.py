"""Host memory for what a role does not need at the moment: weights, gradient buffers, optimizer state."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from mppo.megatron import platform


class OffloadedTensors:
    """Storages that are given up on the device while nobody is inside `onloaded`.

    Whole storages move, so tensors that are views of one another stay so, and every reference to them stays good. Their
    host memory, pinned where there is a GPU, is kept; copies go through a stream of their own, so that the host waits
    for none, and who works next does not wait for what is carried away (on CUDA unproven).
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool = True):
        """`tensors` are asked for each time, since an optimizer makes its state late. Without `keep` their content is
        forgotten: gradients, which are zeroed before they are used."""
        self._tensors, self._keep = tensors, keep
        self._host: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """By the identity of a storage: itself, which keeps the identity its own, and its host memory."""
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        """With the sizes that they have on the device."""
        self._visitors, self._written = 0, True
        self._stream = platform.new_stream()

    def offload(self) -> None:
        """Give the device's memory back. What may have been written since the last time is copied to the host first."""
        storages = {s._cdata: s for t in self._tensors() if (s := t.untyped_storage()).nbytes()}
        with platform.on_stream(self._stream):
            resting = {s._cdata: self._host[s._cdata] for s, _ in self._offloaded if self._keep}
            moving = {place: (s, self._on_host(place, s)) for place, s in storages.items() if self._keep}
        self._host = resting | moving
        for storage in storages.values():
            self._offloaded.append((storage, storage.nbytes()))
            platform.give_up(storage, self._stream)
        self._written = False

    def _on_host(self, place: int, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The storage's host memory, with its content."""
        _, host = self._host.get(place, (None, None))
        if host is None or host.nbytes() != storage.nbytes():
            host = platform.host_memory(storage.nbytes())
        elif not self._written:
            return host
        host.copy_(storage, non_blocking=True)
        return host

    def _fetch(self) -> None:
        for storage, size in self._offloaded:
            storage.resize_(size)
        with platform.on_stream(self._stream):
            for storage, _ in self._offloaded:
                if self._keep:
                    storage.copy_(self._host[storage._cdata][1], non_blocking=True)
        platform.wait_for(self._stream)
        self._offloaded = []

    @contextmanager
    def onloaded(self, *, writes: bool = True) -> Iterator[None]:
        """The content is on the device inside; it may be entered again. What is written without `writes` is lost."""
        if not self._visitors:
            self._fetch()
        self._visitors += 1
        self._written |= writes
        try:
            yield
        finally:
            self._visitors -= 1
            if not self._visitors:
                self.offload()

    @property
    def offloaded_bytes(self) -> int:
        return sum(size for _, size in self._offloaded)


def weights_of(chunks: list[torch.nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for chunk in unwrap_model(chunks):
        yield from (p.data for p in chunk.parameters())
        yield from chunk.buffers()


def gradients_of(chunks: list[DistributedDataParallel]) -> Iterator[Tensor]:
    """The gradient buffers of Megatron's DistributedDataParallel."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Moments and fp32 master weights of a Megatron optimizer, chained or not."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor) and x.dim())
        for groups in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(part, groups, []):
                yield from (x.data for x in group if x is not None)
