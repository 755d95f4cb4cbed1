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

    Whole storages move, so tensors that are views of one another stay so, and every reference to them stays good.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool = True):
        """`tensors` are asked for each time, since an optimizer makes its state late. Without `keep` their content is
        forgotten: gradients, which are zeroed before they are used."""
        self._tensors, self._keep = tensors, keep
        self._offloaded: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        self._visitors = 0

    def offload(self) -> None:
        """Move the content to host memory and give the device's back."""
        storages = {s.data_ptr(): s for t in self._tensors() if (s := t.untyped_storage()).nbytes()}
        for storage in storages.values():
            size = storage.nbytes()
            self._offloaded.append((storage, size, _host_copy(storage) if self._keep else None))
            storage.resize_(0)

    def _fetch(self) -> None:
        for storage, size, content in self._offloaded:
            storage.resize_(size)
            if content is not None:
                storage.copy_(content)
        self._offloaded = []

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """The content is on the device inside; it may be entered again."""
        if not self._visitors:
            self._fetch()
        self._visitors += 1
        try:
            yield
        finally:
            self._visitors -= 1
            if not self._visitors:
                self.offload()

    @property
    def offloaded_bytes(self) -> int:
        return sum(size for _, size, _ in self._offloaded)


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    host = torch.UntypedStorage(storage.nbytes())
    if platform.has_cuda():
        host = host.pin_memory()
    host.copy_(storage)
    return host


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
