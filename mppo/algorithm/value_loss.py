"""The clipped value loss of PPO2 (1707.06347, https://github.com/openai/baselines)."""

from torch import Tensor, maximum

from mppo.algorithm.statistics import TokenStatistic


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, TokenStatistic]]:
    """Token losses `[T]`: half the larger of the squared errors with and without clipping the change of value.

    `values` are the critic's current predictions, `old_values` those made before the update; all `[T]`.
    """
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)
    error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    statistics = {
        "vf_clipfrac": TokenStatistic((clipped_error > error).float()),
        "vpred_mean": TokenStatistic(values),
    }
    return 0.5 * maximum(error, clipped_error), statistics
