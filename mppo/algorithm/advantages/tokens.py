"""Whitening and running sums over packed tokens, without a loop over them."""

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction
from mppo.algorithm.statistics import std
from mppo.errors import ConfigError


def check_discount(name: str, value: float) -> None:
    """Raise ConfigError for a discount outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"algorithm.adv_options.{name} is {value}; it must be in [0, 1]")


def whiten(x: Tensor, mask: Tensor, reduction: Reduction) -> Tensor:
    """Mean 0 and (unbiased) variance 1 over the masked positions of the global batch; 0 outside the mask.

    With fewer than two positions there is no variance: what is returned is 0 everywhere.
    """
    whole = std(x, mask, unbiased=True).reduced(reduction)
    centred = torch.where(mask.bool(), x.double() - whole.mean, 0.0)
    return (centred * torch.rsqrt(whole.variance + 1e-8)).to(x.dtype)


def discounted_suffix_sum(x: Tensor, ids: Tensor, discount: float) -> Tensor:
    """`y[t] = x[t] + discount * y[t+1]` within each run of equal `ids`, over `[N]`.

    A doubling scan: after step k, y[t] holds the terms up to t + 2^k; log2(longest run) passes over the vector.
    """
    longest = int(ids.bincount().max()) if len(ids) else 0
    shift = 1
    while shift < longest:
        same = (ids[shift:] == ids[:-shift]).to(x.dtype)
        x = torch.cat([x[:-shift] + discount**shift * same * x[shift:], x[-shift:]])
        shift *= 2
    return x


def segment_cumsum(x: Tensor, ids: Tensor) -> Tensor:
    """`y[t] = y[t-1] + x[t]` within each run of equal, non-decreasing `ids`, over `[N]` float64."""
    total = x.double().cumsum(0)
    before = torch.cat([total.new_zeros(1), total])
    return total - before[run_starts(ids)]


def run_starts(ids: Tensor) -> Tensor:
    """`[N]` long: where the run of equal, non-decreasing `ids` begins that each entry belongs to."""
    _, lengths = torch.unique_consecutive(ids, return_counts=True)
    return torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)


def rewards_to_go(rewards: Tensor, mask: Tensor, ids: Tensor, discount: float = 1.0) -> Tensor:
    """`[T]`: discounted sum of the rewards from each action of a trajectory on, 0 where there is no action."""
    actions = mask.bool().nonzero().squeeze(-1)
    to_go = discounted_suffix_sum(rewards[actions], ids[actions], discount)
    return torch.zeros_like(rewards).index_copy(0, actions, to_go)
