"""What the batch says about the critic and the group signal."""

from collections.abc import Callable

import torch
from torch import Tensor


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce_sum: Callable[[Tensor], Tensor]) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the masked positions of the global batch.

    1: the critic foresees everything; 0: no better than a constant, or the returns do not vary.
    """
    kept = mask.bool()
    returns, errors = returns[kept].double(), (returns - values)[kept].double()
    count = reduce_sum(torch.tensor(float(len(returns)), dtype=torch.double, device=returns.device))
    means = reduce_sum(torch.stack([returns.sum(), errors.sum()])) / count.clamp(min=1)
    centred = torch.stack([(returns - means[0]).square().sum(), (errors - means[1]).square().sum()])
    total, unexplained = reduce_sum(centred).tolist()
    rounding = 1e-20 * count.item() * means[0].item() ** 2
    return 1.0 - unexplained / total if total > rounding else 0.0
