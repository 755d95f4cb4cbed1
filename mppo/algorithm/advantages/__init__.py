"""Advantage estimators by name."""

from mppo.algorithm.advantages import gae, grpo, reinforce_plus_plus  # noqa: F401  (registers)
from mppo.algorithm.advantages.base import ESTIMATORS, AdvantageInputs, Advantages

__all__ = ["ESTIMATORS", "AdvantageInputs", "Advantages"]
