"""Stand-in for SGLang's compiled kernels, which exist for CUDA only.

SGLang imports names from it on every device, and without AMX calls one of them on the CPU: that one is here, in torch.
Every other imports and raises when it is called. `torch.ops.sgl_kernel` stays empty, by which SGLang sees that there is
no AMX.
"""

from typing import NoReturn

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Writes each request's new cache slots, which follow each other in `out_cache_loc`, into its row of the pool."""
    done = 0
    for row, first, stop in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[done : done + stop - first]
        req_to_token[row, first:stop] = slots.to(req_to_token.dtype)
        done += stop - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} exists on CUDA only (launch/sglang_cpu)")

    missing.__name__ = name
    return missing
