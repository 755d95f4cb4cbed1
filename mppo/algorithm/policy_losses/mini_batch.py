"""What a loss may know of the whole mini-batch before its training pass: the input of `prepare`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.counter_random import uniform
from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.segments import Segments
from mppo.algorithm.statistics import mean


@dataclass(frozen=True)
class MiniBatchInputs:
    """This rank's part of the global mini-batch: packed `[T]` vectors, none with a gradient."""

    log_probs: Tensor
    """The policy about to be updated."""
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    segments: Segments
    batch_positions: Tensor
    """`[T]` long: where each position stands in the global mini-batch, whoever holds it."""
    seed: int
    """The same on every rank, another for each optimizer step."""
    reduction: Reduction = WHOLE

    @property
    def loss_tokens(self) -> int:
        """N: masked positions of the global mini-batch."""
        return int(self.reduction.sum(self.mask.sum()))

    def mean(self, x: Tensor) -> Tensor:
        """Mean of `x [T]` over the masked positions of the global mini-batch, 0-dim float64."""
        return mean(x, self.mask).reduced(self.reduction).mean

    def random(self) -> Tensor:
        """`[T]` float64 in [0, 1): a position draws the same number whatever rank holds it."""
        return uniform(self.seed, self.batch_positions)

    def choose(self, score: Tensor, candidates: Tensor, count: int) -> Tensor:
        """`[T]` bool: the `count` candidates of the global mini-batch with the highest score; ties to the earlier."""
        mine = candidates.nonzero().squeeze(-1)
        mine = mine[_best(score[mine], self.batch_positions[mine], count)]
        scores, positions = self.reduction.gather(score[mine]), self.reduction.gather(self.batch_positions[mine])
        return torch.isin(self.batch_positions, positions[_best(scores, positions, count)]) & candidates


def _best(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores; among equals of the lowest positions."""
    if len(scores) <= count:
        return torch.arange(len(scores), device=scores.device)
    least = scores.topk(count).values[-1]
    above, equal = (scores > least).nonzero().squeeze(-1), (scores == least).nonzero().squeeze(-1)
    first = positions[equal].topk(count - len(above), largest=False).indices
    return torch.cat([above, equal[first]])
