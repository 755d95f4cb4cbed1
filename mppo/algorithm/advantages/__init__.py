"""Advantage estimators by name."""

from mppo.algorithm.advantages import (  # noqa: F401  (register)
    baselines,
    gae,
    gdpo,
    grpo,
    optimal_token_baseline,
    reinforce_plus_plus,
)
from mppo.algorithm.advantages.estimator_contract import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    Estimator,
    EstimatorTraits,
    estimator,
)

__all__ = ["ESTIMATORS", "AdvantageInputs", "Advantages", "Estimator", "EstimatorTraits", "estimator"]
