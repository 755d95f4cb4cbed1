"""What the batch says about the critic and the group signal."""

import torch
from torch import Tensor

from mppo.algorithm.reduction import Reduction


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduction: Reduction) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the masked positions of the global batch.

    1: the critic foresees everything; 0: no better than a constant, or the returns do not vary.
    """
    kept = mask.bool()
    returns, errors = returns[kept].double(), (returns - values)[kept].double()
    count = reduction.sum(torch.tensor(float(len(returns)), dtype=torch.double, device=returns.device))
    means = reduction.sum(torch.stack([returns.sum(), errors.sum()])) / count.clamp(min=1)
    centred = torch.stack([(returns - means[0]).square().sum(), (errors - means[1]).square().sum()])
    total, unexplained = reduction.sum(centred).tolist()
    rounding = 1e-20 * count.item() * means[0].item() ** 2
    return 1.0 - unexplained / total if total > rounding else 0.0
