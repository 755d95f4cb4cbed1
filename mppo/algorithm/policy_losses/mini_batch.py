"""What a loss may know of the whole mini-batch before its training pass: the input of `prepare`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.segments import Segments


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
    size: int
    """Positions of the global mini-batch."""
    seed: int
    """The same on every rank, another for each optimizer step."""
    reduction: Reduction = WHOLE

    @property
    def loss_tokens(self) -> int:
        """N: masked positions of the global mini-batch."""
        return int(self.reduction.sum(self.mask.sum()))

    def mean(self, x: Tensor) -> Tensor:
        """Mean of `x [T]` over the masked positions of the global mini-batch, 0-dim float64."""
        kept = torch.where(self.mask, x.double(), 0.0)
        total, count = self.reduction.sum(torch.stack([kept.sum(), self.mask.sum().double()]))
        return total / count.clamp(min=1)

    def random(self) -> Tensor:
        """`[T]` float64 in [0, 1): a position draws the same number whatever rank holds it."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.size, generator=generator, dtype=torch.double).to(self.batch_positions.device)[
            self.batch_positions
        ]

    def choose(self, score: Tensor, candidates: Tensor, count: int) -> Tensor:
        """`[T]` bool: the `count` candidates of the global mini-batch with the highest score; ties to the earlier."""
        mine = candidates.nonzero().squeeze(-1)
        mine = mine[_best(score[mine], self.batch_positions[mine], count)]
        scores, places = self.reduction.gather(score[mine]), self.reduction.gather(self.batch_positions[mine])
        return torch.isin(self.batch_positions, places[_best(scores, places, count)]) & candidates


def _best(scores: Tensor, places: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores; among equals of the lowest places."""
    if len(scores) <= count:
        return torch.arange(len(scores), device=scores.device)
    least = scores.topk(count).values[-1]
    above, equal = (scores > least).nonzero().squeeze(-1), (scores == least).nonzero().squeeze(-1)
    first = places[equal].topk(count - len(above), largest=False).indices
    return torch.cat([above, equal[first]])
