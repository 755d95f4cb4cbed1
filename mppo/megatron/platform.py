"""The only file that knows whether there is a GPU.

On CUDA: NCCL, Transformer Engine layers and fused optimizers where they are installed. Without CUDA: gloo, and a
small stand-in for the parts of `torch.cuda` that an unmodified megatron-core (0.16 to 0.19) calls. Nothing inside
megatron is patched; `prepare` must run before the first `import megatron.core`.
"""

import functools
import logging
import os
import resource
import socket
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mppo.errors import ConfigError

CPU = torch.device("cpu")


def has_cuda() -> bool:
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether its layers for torch can be used; they are CUDA only."""
    if not has_cuda():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def own_gpu() -> torch.device | None:
    """That of this process, once `bind_device` has given it one. Told of it, NCCL connects at once and not in the first
    collective, and a barrier does not guess (unproven: never run on more than one GPU)."""
    return device() if has_cuda() else None


def backend() -> str:
    """Tensors on the host always travel over gloo."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def outside_group(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> dist.ProcessGroup:
    """A process group with processes that are not the trainer's, registered nowhere; waits until all have joined.

    Over NCCL on CUDA (unproven: never run on a GPU; NCCL wants one version of itself on both sides), else over gloo on
    the interface that reaches `host`. Raises RuntimeError when the others do not come in time.
    """
    if has_cuda():
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def wait_for_device() -> None:
    """Until the GPU has done what this thread has asked of it; without one nothing is left to do."""
    if has_cuda():
        torch.cuda.current_stream().synchronize()


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


def peak_memory() -> int:
    """The most bytes that this process has held so far: on its GPU, or without one in all."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def new_stream() -> "torch.cuda.Stream | None":
    """For copies beside the computation; None without a GPU."""
    return torch.cuda.Stream() if has_cuda() else None


@contextmanager
def on_stream(stream: "torch.cuda.Stream | None"):
    """Work inside is queued on `stream`, after all that is queued by now."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def wait_for(stream: "torch.cuda.Stream | None") -> None:
    """Let the device go on only after what is queued on `stream`; the host does not wait."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def give_up(storage: torch.UntypedStorage, stream: "torch.cuda.Stream | None") -> None:
    """Return a storage's memory; on a GPU it is given to nobody before `stream` is done with it."""
    if stream is not None:
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).record_stream(stream)
    storage.resize_(0)


def return_cached_memory() -> None:
    """Give back what torch keeps of a GPU's memory for itself, so that another process can have it (unproven)."""
    if has_cuda():
        torch.cuda.empty_cache()


def host_memory(size: int) -> torch.UntypedStorage:
    """Of so many bytes; pinned where there is a GPU, so that copies to and from it are not waited for."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=has_cuda()).untyped_storage()


def bind_device(local_rank: int) -> None:
    """Give this process its GPU, if there are any. Raises ConfigError when there are fewer than processes."""
    if has_cuda():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank} of this machine has no GPU: it has {torch.cuda.device_count()}; lower"
                " --nproc-per-node, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        torch.cuda.set_device(local_rank)


@contextmanager
def named_range(name: str):
    """An NVTX range on CUDA, which Nsight shows; otherwise a `record_function`, which torch's profiler shows."""
    if has_cuda():
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()
    else:
        with torch.profiler.record_function(name):
            yield


def prepare() -> None:
    """Quieten the libraries, and on a machine without CUDA install the stand-ins. Idempotent."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron|torch")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron")
    # Megatron's linear layers want this for the order of communication and computation on one stream.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not has_cuda() and not hasattr(torch.cuda, "mppo_stand_in"):
        _install_cpu_stand_ins()


def _install_cpu_stand_ins() -> None:
    torch.cuda.mppo_stand_in = True
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # megatron decorates with torch.compile at import
    _stand_in_streams()
    _stand_in_rng()
    _redirect_factories()
    _report_cuda_tensor_types()


class _Event(torch.cpu.Event):
    def __init__(self, *args, **kwargs):
        pass


class _Stream(torch.cpu.Stream):
    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or _Event()


def _stand_in_streams() -> None:
    """torch.cpu has streams and events of the same interface. torch._dynamo refuses one function under two names."""
    stream = _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.stream = lambda s: torch.cpu.stream(s)
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: CPU


class _DefaultGenerators:
    def __getitem__(self, _):
        return torch.default_generator


def _stand_in_rng() -> None:
    """Megatron's random states are those of the CPU's default generator."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda._lazy_call = lambda callback, **_: callback()
    torch.cuda.default_generators = _DefaultGenerators()
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _redirect_factories() -> None:
    """Megatron names device="cuda" literally in schedules, optimizers and checkpoint loading."""

    def on_cpu(factory):
        @functools.wraps(factory)
        def wrapper(*args, **kwargs):
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return wrapper

    with CPU:  # torch notes its factories at the first `with device:`, and must note its own, not these wrappers
        torch.empty(0)
    for name in ("zeros", "tensor", "ones", "empty", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.distributed.all_to_all_single = _with_plain_splits(torch.distributed.all_to_all_single)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _with_plain_splits(all_to_all_single):
    """Megatron turns split sizes into numbers only when they come from the GPU."""

    @functools.wraps(all_to_all_single)
    def wrapper(*args, **kwargs):
        splits = {name: kwargs[name].tolist() for name in kwargs if torch.is_tensor(kwargs[name]) and "split" in name}
        return all_to_all_single(*args, **{**kwargs, **splits})

    return wrapper


def _report_cuda_tensor_types() -> None:
    """Megatron's optimizers up to 0.16 compare `tensor.type()` with 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def cuda_type(self, dtype=None, *args, **kwargs):
        if dtype is None:
            return "torch.cuda." + original(self).rpartition(".")[2]
        return original(self, dtype, *args, **kwargs)

    torch.Tensor.type = cuda_type
