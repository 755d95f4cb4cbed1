"""What a rank holds and sends, measured: bytes of collectives, and bytes that autograd keeps."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def size_of(tensors: Tensor | Iterable[Any]) -> int:
    """Bytes of a tensor, or of all in lists, however deep."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(size_of, tensors))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in collectives, by kind of group, as rings do them (see the estimate's docstring).

    Autograd on a CPU runs in the thread that calls it, so that collectives of the backward pass are seen too.
    """

    def __init__(self, kinds: dict[str, str]):
        """`kinds` are those of groups, by their names, and "control" for others; `send` counts as `pipeline` over
        whatever group it goes."""
        super().__init__()
        self.kinds = defaultdict(lambda: "control", kinds)
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
        kind = "pipeline" if name == "send" else self.kinds[group.group_name]
        self.bytes[kind] += ring_bytes(name, args, group)


def _is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(x._type())


def ring_bytes(name: str, args: tuple, group: dist.ProcessGroup) -> int:
    """That one rank sends: an all-reduce is a scattered sum and a gather, each of which sends all parts but one.

    Broadcasts are not counted: the step has them for metrics only.
    """
    ranks = group.size()
    if "allreduce" in name:
        return 2 * size_of(args[0]) * (ranks - 1) // ranks
    if "gather" in name:
        return size_of(args[0]) * (ranks - 1) // ranks
    if "reduce_scatter" in name:
        return size_of(args[1]) * (ranks - 1) // ranks
    if name == "alltoall_base_":
        return size_of(args[1]) - _kept(args[1], args[4], group)
    if name == "send":
        return size_of(args[0])
    assert name in ("recv_", "broadcast_", "barrier"), f"{name} is not counted"
    return 0


def _kept(rows: Tensor, splits: list[int], group: dist.ProcessGroup) -> int:
    """Bytes that an all-to-all gives to this rank itself."""
    own = splits[group.rank()] if splits else len(rows) // group.size()
    return own * size_of(rows) // max(len(rows), 1)


class Kept:
    """Bytes of the storages that autograd keeps for backward passes, at the highest moment; parameters left out."""

    def __init__(self, parameters: Iterable[Tensor]):
        self._left_out = {p.untyped_storage()._cdata for p in parameters}
        self._holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def __enter__(self) -> "Kept":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: _Holder(self, x), lambda holder: holder.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.__exit__(*exception)

    def add(self, x: Tensor, count: int) -> None:
        storage = x.untyped_storage()
        place = storage._cdata  # fake tensors have one, too
        if place in self._left_out:
            return
        before = self._holders[place]
        self._holders[place] += count
        if not before or not self._holders[place]:
            self.now += count * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Holder:
    """A saved tensor: it is kept until autograd lets go of it."""

    def __init__(self, kept: Kept, tensor: Tensor):
        self.kept, self.tensor = kept, tensor
        kept.add(tensor, 1)

    def __del__(self):
        self.kept.add(self.tensor, -1)
