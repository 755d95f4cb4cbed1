"""The shaping of outcomes that a configuration asks for."""

from mppo.algorithm.reward_shaping import OutcomeShaping
from mppo.config import RewardConfig


def outcome_shaping(reward: RewardConfig, max_response_length: int) -> OutcomeShaping:
    return OutcomeShaping(
        max_response_length=max_response_length,
        overlong_buffer=reward.overlong_buffer.len,
        penalty_factor=reward.overlong_buffer.penalty_factor,
        normalise=reward.running_normalization,
        clip=reward.clip,
    )
