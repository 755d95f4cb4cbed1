"""Every time that the host asks the device for content."""

import traceback
from pathlib import Path

import numpy as np
import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.utils._python_dispatch import TorchDispatchMode

ROOTS = (str(Path(__file__).parents[2] / "mppo"), "megatron/core")


class EvenlyRouted:
    """What the host asks of the routing of a mixture of experts: `choices` of this rank, alike for all experts.

    Megatron's dispatcher waits for these numbers, which are the sizes of what it sends; and without Transformer
    Engine's fused permutation for the rows that the map selects.
    """

    def __init__(self, waits: "Waits", choices: int):
        self.waits, self.choices = waits, choices

    def __enter__(self) -> None:
        token_dispatcher.maybe_move_tensor_to_cpu = self._numbers
        torch.Tensor.masked_select = lambda x, mask: self._selected(x)
        self._refused = torch.cuda.Event.synchronize
        torch.cuda.Event.synchronize = lambda event: self.waits.remember("synchronize")

    def __exit__(self, *exception) -> None:
        token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu
        del torch.Tensor.masked_select
        torch.cuda.Event.synchronize = self._refused

    def _numbers(self, x, as_numpy: bool = False, record_stream: bool = False):
        if not isinstance(x, torch.Tensor) or not x.is_cuda:
            return x
        self.waits.remember("sizes")
        return np.full(tuple(x.shape), self.choices // x.numel())

    def _selected(self, x: torch.Tensor) -> torch.Tensor:
        self.waits.remember("masked_select")
        return x.flatten()[: self.choices]


def keep_orders_on_host(chunks: list[torch.nn.Module]) -> None:
    """The fixed orders of experts and ranks, which Megatron has on the host; made among fakes they have no content."""
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        dispatcher = layer.token_dispatcher
        order = np.arange(dispatcher.num_experts * dispatcher.tp_size).reshape(-1, dispatcher.num_local_experts)
        dispatcher.sort_input_by_local_experts = order.T.ravel()
        dispatcher.restore_output_by_local_experts = order.reshape(dispatcher.num_local_experts, -1).T.ravel()


class Waits(TorchDispatchMode):
    """Remembers who asked. Numbers that are asked for are 1, and what is copied to the host is anything."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name
        if name == "aten::_local_scalar_dense" and args[0].is_cuda:
            self.remember(name)
            return 1.0 if args[0].is_floating_point() else 1
        to = kwargs.get("device")
        if name == "aten::_to_copy" and to is not None and torch.device(to).type == "cpu" and args[0].is_cuda:
            self.remember(name)
        return func(*args, **kwargs)

    def remember(self, operation: str) -> None:
        frames = [f for f in traceback.extract_stack() if any(root in f.filename for root in ROOTS)]
        where = " < ".join(f"{Path(f.filename).name}:{f.name}" for f in reversed(frames[-3:]))
        self.found.append(f"{operation.removeprefix('aten::')} in {where}")
