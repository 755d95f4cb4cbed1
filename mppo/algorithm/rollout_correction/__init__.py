"""Making up for the gap between the policy that generated and the one that is trained."""

from mppo.algorithm.rollout_correction.config import RolloutCorrectionConfig, preset_names, rollout_correction_config
from mppo.algorithm.rollout_correction.correction import PREFIX, Correction, CorrectionInputs, correct, mismatch
from mppo.algorithm.rollout_correction.plugins import IMPORTANCE_WEIGHTS, REJECTIONS

__all__ = [
    "IMPORTANCE_WEIGHTS",
    "PREFIX",
    "REJECTIONS",
    "Correction",
    "CorrectionInputs",
    "RolloutCorrectionConfig",
    "correct",
    "mismatch",
    "preset_names",
    "rollout_correction_config",
]
