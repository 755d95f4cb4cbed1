"""Random numbers that follow from a seed and a counter alone, so that no rank draws those of another.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the counter steps by the
golden ratio, and a mixing function makes 64 random bits of it. Tensors of int64 wrap around as its unsigned words do.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seed: int, counters: Tensor) -> Tensor:
    """`[N]` long -> `[N]` float64 in [0, 1): the number of each counter in the stream of `seed`."""
    stream = _mix(torch.full((), _signed(seed), device=counters.device))
    bits = _mix(stream + (counters.long() + 1) * _signed(GOLDEN))
    return _shifted(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left, as of an unsigned word."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word
