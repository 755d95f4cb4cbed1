"""The largest numbers of the global batch, found by counting: no rank sees the numbers of another.

A radix selection: 64-bit keys are narrowed down byte by byte, from the highest, and ranks exchange 256 counts each.
"""

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction

SIGN = -(2**63)


def among_largest(scores: Tensor, positions: Tensor, count: int, reduction: Reduction) -> Tensor:
    """`[N]` bool: which `scores [N]` are among the `count` (at least 1) largest of all ranks.

    Of equal scores those count that stand at the lowest `positions [N]` (long, no two alike). Collective.
    """
    keys = sortable(scores)
    if int(reduction.sum(torch.tensor(len(keys), device=keys.device))) <= count:
        return torch.ones_like(keys, dtype=torch.bool)
    least, equal_ones = _smallest_of_largest(keys, count, reduction)
    equal = keys == least
    last, _ = _smallest_of_largest(-positions[equal], equal_ones, reduction)
    return (keys > least) | (equal & (-positions >= last))


def sortable(scores: Tensor) -> Tensor:
    """`[N]` long in the order of the scores, as their float64 bits nearly are: of negative ones it is turned round."""
    bits = (scores.double() + 0.0).view(torch.long)  # where -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ ~SIGN, bits)


def _smallest_of_largest(keys: Tensor, count: int, reduction: Reduction) -> tuple[int, int]:
    """The smallest of the `count` largest keys of all ranks, and how many keys equal to it are among them."""
    words, found, left = keys ^ SIGN, 0, count  # whose order, as unsigned words, is that of the keys
    for shift in range(56, -1, -8):
        digits = (words >> shift) & 255
        counts = reduction.sum(digits.bincount(minlength=256)).tolist()
        digit = 255
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        words, found = words[digits == digit], found << 8 | digit
    return found + SIGN, left
