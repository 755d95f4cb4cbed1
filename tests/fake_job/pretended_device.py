"""Tensors with content that say they are on `cuda`, on a machine without one: what meets a tensor of the host is told.

They are held on the CPU, where every operation on them is carried out. As on a GPU, an operation wants all its tensors
on one device, but for numbers without a dimension and for indices, which may be the host's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
MAY_MEET = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_")


class OnDevice(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=DEVICE)
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return PretendedDevice.run(operation, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Inside, what is made on `cuda` is made so."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return self.run(operation, args, kwargs or {})

    @staticmethod
    def run(operation, args, kwargs):
        name = operation.overloadpacket._qualified_op_name
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_device = any(isinstance(x, OnDevice) for x in tensors)
        strays = [x for x in tensors if not isinstance(x, OnDevice) and x.dim()]
        assert not (on_device and strays and name not in MAY_MEET), f"{name} got a tensor of the host and one of cuda"
        if kwargs.get("device") is not None:
            on_device = torch.device(kwargs["device"]).type == "cuda"
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if name == "aten::copy_":
            on_device = isinstance(args[0], OnDevice)
        held = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
        found = operation(*held[0], **held[1])
        own = {id(x.held): x for x in tensors if isinstance(x, OnDevice)}

        def given_back(x):
            if not isinstance(x, Tensor) or not on_device:
                return x
            return own.get(id(x)) if id(x) in own else OnDevice(x)  # an operation in place gives back what it got

        return tree_map(given_back, found)
