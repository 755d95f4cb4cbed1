"""What the batch says about the critic and the group signal."""

from torch import Tensor

from mppo.algorithm.reduction import Reduction
from mppo.algorithm.statistics import reduced, std


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduction: Reduction) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the masked positions of the global batch.

    1: the critic foresees everything; 0: no better than a constant, or the returns do not vary.
    """
    spreads = {
        "returns": std(returns, mask, unbiased=False),
        "errors": std(returns - values, mask, unbiased=False),
    }
    whole = reduced(spreads, reduction)
    total, unexplained = (s.squares_about(s.mean).item() for s in (whole["returns"], whole["errors"]))
    rounding = 1e-20 * (whole["returns"].count * whole["returns"].mean.square()).item()
    return 1.0 - unexplained / total if total > rounding else 0.0
