"""Importance weights and rejection of a batch, with their metrics, all exact over the global batch."""

from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
from torch import Tensor

from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.rollout_correction.config import Bounds, RolloutCorrectionConfig
from mppo.algorithm.rollout_correction.plugins import IMPORTANCE_WEIGHTS, REJECTIONS, clamped
from mppo.algorithm.segments import Segments
from mppo.algorithm.statistics import (
    Statistics,
    effective_sample_size,
    largest,
    mean,
    normaliser,
    numbers,
    prefixed,
    reduced,
    smallest,
    std,
)

PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class CorrectionInputs:
    """This rank's part of the batch, packed `[T]`, without gradients; the trajectories are whole."""

    log_probs: Tensor
    """pi_train: the PPO anchor, or in bypass mode the current policy."""
    rollout_log_probs: Tensor
    mask: Tensor
    """Actions that train so far; metrics are over these, before rejection."""
    segments: Segments
    reduction: Reduction = WHOLE

    @cached_property
    def log_ratio(self) -> Tensor:
        """`log pi_train - log pi_rollout`, 0 outside the mask."""
        return torch.where(self.mask, (self.log_probs.double() - self.rollout_log_probs.double()).detach(), 0.0)

    @cached_property
    def present(self) -> Tensor:
        """`[S]` bool: trajectories that have an action."""
        return self.segments.lengths(self.mask) > 0


@dataclass(frozen=True)
class Correction:
    importance_weights: Tensor | None
    """`[T]`, 0 outside the mask; None without importance weights."""
    kept: Tensor
    """`[T]` bool: the part of the mask that no option rejects."""
    statistics: Statistics
    """`rollout_corr/*` over the global batch; those of several mini-batches add up."""

    @property
    def metrics(self) -> dict[str, float]:
        """`rollout_corr/*`"""
        return numbers(self.statistics)


def correct(x: CorrectionInputs, config: RolloutCorrectionConfig) -> Correction:
    """Importance weights, what is kept, and the metrics.

    The weights follow from all actions; they are normalised over those that are kept.
    """
    kept, statistics = reject(x, config)
    statistics |= off_policy_statistics(x)
    if config.rollout_is is None:
        return Correction(None, kept, prefixed(PREFIX, reduced(statistics, x.reduction)))
    weights, of_weights = importance_weights(x, config.rollout_is, config, kept)
    statistics = reduced(statistics | of_weights, x.reduction)
    if config.rollout_is_batch_normalize:
        weights = weights / statistics[NORM_FACTOR].value
    return Correction(weights.to(x.log_probs.dtype), kept, prefixed(PREFIX, statistics))


NORM_FACTOR = "rollout_is_batch_norm_factor"
"""The metric that tells what the importance weights were divided by."""


def importance_weights(
    x: CorrectionInputs, name: str, config: RolloutCorrectionConfig, kept: Tensor
) -> tuple[Tensor, Statistics]:
    """Truncated (TIS) or zeroed outside the band (IcePop), `[T]` float64, before they are normalised."""
    plugin, bounds = IMPORTANCE_WEIGHTS.get(name), config.is_bounds
    per_sequence = plugin.traits.per_sequence
    log_weights = plugin.fn(x.log_ratio, x.mask, x.segments)
    raw = torch.where(x.mask, clamped(log_weights).exp(), 0.0)
    if bounds.lower is None:
        weights = raw.clamp(max=bounds.upper)
    else:
        weights = torch.where((raw >= bounds.lower) & (raw <= bounds.upper), raw, 0.0)
    statistics = weight_statistics(x, raw, weights, bounds)
    if per_sequence:
        statistics |= _extremes_of_trajectories(x, log_weights, bounds)
    else:
        statistics |= _extremes_of_tokens(x, raw, weights, bounds)
    if config.rollout_is_batch_normalize and per_sequence:  # over trajectories, where each has one weight
        present = x.segments.lengths(kept) > 0
        statistics[NORM_FACTOR] = normaliser(x.segments.mean(weights, kept), present)
    elif config.rollout_is_batch_normalize:
        statistics[NORM_FACTOR] = normaliser(weights, kept)
    return weights, statistics


def weight_statistics(x: CorrectionInputs, raw: Tensor, weights: Tensor, bounds: Bounds) -> Statistics:
    """Of the weights `[T]` before (`raw`) and after truncation."""
    mask, present, lower = x.mask, x.present, _lower(bounds)
    by_sequence, raw_by_sequence = x.segments.mean(weights, mask), x.segments.mean(raw, mask)
    statistics = {
        "rollout_is_mean": mean(weights, mask),
        "rollout_is_std": std(weights, mask, unbiased=False),
        "rollout_is_eff_sample_size": effective_sample_size(weights, mask),
        "rollout_is_seq_mean": mean(by_sequence, present),
        "rollout_is_seq_std": std(by_sequence, present, unbiased=True),
        "rollout_is_seq_max": largest(by_sequence, present),
        "rollout_is_seq_min": smallest(by_sequence, present),
        "rollout_is_seq_max_deviation": largest((by_sequence - 1).abs(), present),
        "rollout_is_seq_fraction_high": mean(raw_by_sequence > bounds.upper, present),
        "rollout_is_seq_fraction_low": mean(raw_by_sequence < lower, present),
    }
    if bounds.lower is not None:
        statistics["rollout_is_oob_ratio"] = mean((raw < bounds.lower) | (raw > bounds.upper), mask)
    return statistics


def _extremes_of_tokens(x: CorrectionInputs, raw: Tensor, weights: Tensor, bounds: Bounds) -> Statistics:
    return {
        "rollout_is_max": largest(weights, x.mask),
        "rollout_is_min": smallest(weights, x.mask),
        "rollout_is_ratio_fraction_high": mean(raw > bounds.upper, x.mask),
        "rollout_is_ratio_fraction_low": mean(raw < _lower(bounds), x.mask),
    }


def _extremes_of_trajectories(x: CorrectionInputs, log_weights: Tensor, bounds: Bounds) -> Statistics:
    """Of the weights before truncation, one for each trajectory."""
    of_sequence, present = x.segments.mean(log_weights, x.mask), x.present
    return {
        "rollout_is_max": largest(of_sequence.clamp(max=20.0).exp(), present),
        "rollout_is_min": smallest(of_sequence.exp(), present),
        "rollout_is_ratio_fraction_high": mean(of_sequence > log(bounds.upper), present),
        "rollout_is_ratio_fraction_low": mean(of_sequence < log(_lower(bounds)), present),
    }


def _lower(bounds: Bounds) -> float:
    return 1 / bounds.upper if bounds.lower is None else bounds.lower


def reject(x: CorrectionInputs, config: RolloutCorrectionConfig) -> tuple[Tensor, Statistics]:
    """`kept [T]` bool: what every option keeps; and how much each rejects."""
    kept = x.mask.clone()
    statistics: Statistics = {}
    for name, bounds in config.rs_bounds.items():
        option = REJECTIONS.get(name)
        divergence = option.fn(clamped(x.log_ratio), x.mask, x.segments)
        keeps = divergence <= bounds.upper
        if bounds.lower is not None:
            keeps &= divergence >= bounds.lower
        keeps = x.segments.expand(keeps) if option.traits.per_sequence else keeps
        of_option = divergence_statistics(x, option.traits.per_sequence, divergence, bounds)
        statistics |= prefixed(f"rollout_rs_{name}_", of_option | _masked_fractions(x, keeps))
        kept &= keeps
    if config.rollout_rs is not None:
        statistics |= prefixed("rollout_rs_", _masked_fractions(x, kept))
    return kept, statistics


def _masked_fractions(x: CorrectionInputs, keeps: Tensor) -> Statistics:
    """Of tokens, and of trajectories that lose any token."""
    rejected = x.mask & ~keeps
    return {
        "masked_fraction": mean(rejected, x.mask),
        "seq_masked_fraction": mean(x.segments.lengths(rejected) > 0, x.present),
    }


def divergence_statistics(x: CorrectionInputs, per_sequence: bool, divergence: Tensor, bounds: Bounds) -> Statistics:
    """Of what a rejection option goes by: `[S]` if `per_sequence`, else `[T]`."""
    two_sided, present = bounds.lower is not None, x.present
    lower = 0.0 if bounds.lower is None else bounds.lower
    if per_sequence:
        by_token, by_sequence, over = x.segments.expand(divergence), divergence, present
    else:
        by_token, by_sequence, over = divergence, x.segments.mean(divergence, x.mask), x.mask
    below = divergence < lower if two_sided else torch.zeros_like(divergence, dtype=torch.bool)
    statistics = {
        "mean": mean(by_token, x.mask),
        "std": std(by_token.clamp(lower, bounds.upper), x.mask, unbiased=False),
        "max": largest(divergence, over),
        "min": smallest(divergence, over),
        "fraction_high": mean(divergence > bounds.upper, over),
        "fraction_low": mean(below, over),
        "seq_mean": mean(by_sequence, present),
        "seq_std": std(by_sequence, present, unbiased=True),
        "seq_max": largest(by_sequence, present),
        "seq_min": smallest(by_sequence, present),
        "seq_max_deviation": largest(by_sequence.abs(), present),
        "seq_fraction_high": mean(by_sequence > bounds.upper, present),
    }
    if two_sided:
        statistics["seq_fraction_low"] = mean(by_sequence < lower, present)
    return statistics


def mismatch(log_ratio: Tensor, mask: Tensor) -> Statistics:
    """How far `log pi_train - log pi_rollout`, `[T]`, is from 0: KL(rollout || train) as k1, and the mean distance."""
    return {"kl": mean(-log_ratio, mask), "log_prob_distance": mean(log_ratio.abs(), mask)}


def off_policy_statistics(x: CorrectionInputs) -> Statistics:
    """How far pi_train is from the policy that generated: perplexities, KL estimates, chi-square."""
    mask, present, log_ratio = x.mask, x.present, x.log_ratio
    train = x.segments.mean(x.log_probs.double(), mask)
    rollout = x.segments.mean(x.rollout_log_probs.double(), mask)
    difference = rollout - train
    return mismatch(log_ratio, mask) | {
        "training_ppl": mean((-train).exp(), present),
        "training_log_ppl": mean(-train, present),
        "rollout_ppl": mean((-rollout).exp(), present),
        "rollout_log_ppl": mean(-rollout, present),
        "k3_kl": mean(torch.expm1(clamped(log_ratio)) - log_ratio, mask),
        "log_ppl_diff": mean(difference, present),
        "log_ppl_abs_diff": mean(difference.abs(), present),
        "log_ppl_diff_max": largest(difference, present),
        "log_ppl_diff_min": smallest(difference, present),
        "ppl_ratio": mean(difference.exp(), present),
        "chi2_token": mean((2 * clamped(log_ratio)).exp() - 1, mask),
        "chi2_seq": mean((2 * clamped(x.segments.sum(log_ratio, mask))).exp() - 1, present),
    }
