"""A GPU that is not there: what torch.cuda answers, so that Megatron-core and mppo take the paths of one.

Tensors are fake (torch's FakeTensorMode): they have a shape, a dtype and a device, `cuda`, and no content. Whoever asks
for content, as a host does that waits for its GPU, raises. Random states are the one thing that is left out.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch


class Stream:
    def __init__(self, *_, **__):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass


def waits(*_, **__):
    raise AssertionError("the host waits for the device")


def pretend() -> None:
    """Before mppo is imported."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: torch.device("cuda", 0)  # an index alone asks for a real one
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.synchronize = torch.cuda.Event.synchronize = Stream.synchronize = waits
    torch.cuda._lazy_init = lambda: None
    torch.cuda.nvtx.range_push = lambda name: None
    torch.cuda.nvtx.range_pop = lambda: None


def pretend_kernels() -> None:
    """After Megatron-core is imported, whose tracker reads states of the device."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import random

    from mppo.megatron import platform

    platform.device = lambda: torch.device("cuda", 0)  # torch.device("cuda", a device) is none
    tensor_parallel.model_parallel_cuda_manual_seed = lambda seed: None
    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    clip_grads.multi_tensor_applier = optimizer.multi_tensor_applier = _fused_kernel
    # Fake tensors know each collective of a bundle, and not the bundle.
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: nullcontext(SimpleNamespace(wait=lambda: None))
    torch.nn.functional.scaled_dot_product_attention = _flash_attention
    torch.nn.Module._apply = _apply_by_replacing
    torch.tensor = _tensor(torch.tensor)
    torch.Tensor.pin_memory = lambda x: torch.empty(x.shape, dtype=x.dtype)  # from here on without content


def _tensor(on_host):
    """`torch.tensor` that has no content where it is on the device."""

    def tensor(data, *, device=None, **options):
        made = on_host(data, **options)
        on_device = device is not None and torch.device(device).type == "cuda"
        return torch.empty(made.shape, dtype=made.dtype, device=device) if on_device else made

    return tensor


def _apply_by_replacing(module: torch.nn.Module, fn, recurse: bool = True) -> torch.nn.Module:
    """As torch does, but for parameters that cannot be swapped because they are fake."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and (moved := fn(parameter)) is not parameter:
                new = part._parameters[name] = torch.nn.Parameter(moved.detach(), parameter.requires_grad)
                vars(new).update(vars(parameter) | vars(new))  # Megatron's marks; a fake has its device there, too
        part._buffers.update({name: None if x is None else fn(x) for name, x in part._buffers.items()})
    return module


def pretend_others() -> None:
    """Other processes hold what this one holds; objects do not travel."""

    def gather(gathered: list, item, group=None) -> None:
        gathered[:] = [item] * len(gathered)

    torch.distributed.all_gather_object = gather
    torch.distributed.broadcast_object_list = lambda objects, *_, **__: None


def _flash_attention(q, k, v, attn_mask=None, *, is_causal=False, scale=None, enable_gqa=False) -> torch.Tensor:
    """What torch chooses for 16 bits on a GPU; this build of it would choose a product that keeps the scores."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]


def _fused_kernel(operation, flag, tensors: list[list[torch.Tensor]], *_):
    """In the place of Transformer Engine's or apex's over many tensors: the norm of one list, or a copy, scaled.

    What Megatron takes where neither is installed waits for the device once for every parameter.
    """
    if len(tensors) == 1:
        return torch.stack([x.norm() for x in tensors[0]]).norm()[None], None
    for source, target in zip(*tensors, strict=True):
        target.copy_(source)
    return None
