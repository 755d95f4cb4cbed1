"""Importance weights and rejection of a batch, with their metrics, all exact over the global batch."""

from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
from torch import Tensor

from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.rollout_correction.config import Bounds, RolloutCorrectionConfig
from mppo.algorithm.rollout_correction.plugins import IMPORTANCE_WEIGHTS, Rejection, clamped
from mppo.algorithm.segments import Segments
from mppo.algorithm.summary import Reduced, Summary

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
    summary: Reduced
    """What the metrics are made of, which adds up over mini-batches."""

    @property
    def metrics(self) -> dict[str, float]:
        """`rollout_corr/*`"""
        return self.summary.numbers(PREFIX)


def correct(x: CorrectionInputs, config: RolloutCorrectionConfig) -> Correction:
    """Weights, what is kept, and the metrics.

    Weights follow from all actions; they are normalised over those that are kept.
    """
    kept, summary = reject(x, config)
    summary |= off_policy_summary(x)
    weights = None
    if config.rollout_is is not None:
        weights, of_weights = importance_weights(x, config, kept)
        summary |= of_weights
    return Correction(weights, kept, summary)


def importance_weights(x: CorrectionInputs, config: RolloutCorrectionConfig, kept: Tensor) -> tuple[Tensor, Reduced]:
    """Truncated (TIS) or zeroed outside the band (IcePop), `[T]` in the dtype of the log-probs."""
    plugin, bounds = IMPORTANCE_WEIGHTS.get(config.rollout_is), config.is_bounds
    per_sequence = bool((plugin.traits or {}).get("per_sequence"))
    log_weights = plugin.fn(x.log_ratio, x.mask, x.segments)
    raw = torch.where(x.mask, clamped(log_weights).exp(), 0.0)
    if bounds.lower is None:
        weights = raw.clamp(max=bounds.upper)
    else:
        weights = torch.where((raw >= bounds.lower) & (raw <= bounds.upper), raw, 0.0)
    summary = _weight_summary(x, log_weights, raw, weights, bounds, per_sequence)
    if config.rollout_is_batch_normalize:
        _mean_of_kept(summary, x, weights, kept, per_sequence)
    reduced = summary.finish(x.reduction)
    weights = weights / reduced.numbers().get("rollout_is_batch_norm_factor", 1.0)
    return weights.to(x.log_probs.dtype), reduced


def _mean_of_kept(summary: Summary, x: CorrectionInputs, weights: Tensor, kept: Tensor, per_sequence: bool) -> None:
    """Over tokens, or over trajectories where each has one weight."""
    name = "rollout_is_batch_norm_factor"
    if per_sequence:
        summary.normaliser(name, x.segments.mean(weights, kept), x.segments.lengths(kept) > 0)
    else:
        summary.normaliser(name, weights, kept)


def _weight_summary(
    x: CorrectionInputs, log_weights: Tensor, raw: Tensor, weights: Tensor, bounds: Bounds, per_sequence: bool
) -> Summary:
    summary, mask, present = Summary(), x.mask, x.present
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    by_sequence, raw_by_sequence = x.segments.mean(weights, mask), x.segments.mean(raw, mask)
    if per_sequence:  # extremes and fractions are of the weights before truncation, one for each trajectory
        of_sequence = x.segments.mean(log_weights, mask)
        summary.largest("rollout_is_max", of_sequence.clamp(max=20.0).exp(), present)
        summary.smallest("rollout_is_min", of_sequence.exp(), present)
        summary.mean("rollout_is_ratio_fraction_high", of_sequence > log(bounds.upper), present)
        summary.mean("rollout_is_ratio_fraction_low", of_sequence < log(lower), present)
    else:
        summary.largest("rollout_is_max", weights, mask)
        summary.smallest("rollout_is_min", weights, mask)
        summary.mean("rollout_is_ratio_fraction_high", raw > bounds.upper, mask)
        summary.mean("rollout_is_ratio_fraction_low", raw < lower, mask)
    summary.mean("rollout_is_mean", weights, mask)
    summary.std("rollout_is_std", weights, mask, unbiased=False)
    summary.effective_sample_size("rollout_is_eff_sample_size", weights, mask)
    summary.mean("rollout_is_seq_mean", by_sequence, present)
    summary.std("rollout_is_seq_std", by_sequence, present, unbiased=True)
    summary.largest("rollout_is_seq_max", by_sequence, present)
    summary.smallest("rollout_is_seq_min", by_sequence, present)
    summary.largest("rollout_is_seq_max_deviation", (by_sequence - 1).abs(), present)
    summary.mean("rollout_is_seq_fraction_high", raw_by_sequence > bounds.upper, present)
    summary.mean("rollout_is_seq_fraction_low", raw_by_sequence < lower, present)
    if bounds.lower is not None:
        summary.mean("rollout_is_oob_ratio", (raw < bounds.lower) | (raw > bounds.upper), mask)
    return summary


def reject(x: CorrectionInputs, config: RolloutCorrectionConfig) -> tuple[Tensor, Reduced]:
    """`kept [T]` bool: what every option keeps; and how much each rejects."""
    kept, summary = x.mask.clone(), Summary()
    for name, option, bounds in config.rs_bounds:
        divergence = option.fn(clamped(x.log_ratio), x.mask, x.segments)
        keeps = divergence <= bounds.upper
        if bounds.lower is not None:
            keeps &= divergence >= bounds.lower
        keeps = x.segments.expand(keeps) if option.per_sequence else keeps
        _rejection_summary(summary, f"rollout_rs_{name}", x, option, divergence, bounds)
        _masked_fractions(summary, f"rollout_rs_{name}", x, keeps)
        kept &= keeps
    if config.rollout_rs is not None:
        _masked_fractions(summary, "rollout_rs", x, kept)
    return kept, summary.finish(x.reduction)


def _masked_fractions(summary: Summary, name: str, x: CorrectionInputs, keeps: Tensor) -> None:
    """Of tokens, and of trajectories that lose any token."""
    rejected = x.mask & ~keeps
    summary.mean(f"{name}_masked_fraction", rejected, x.mask)
    summary.mean(f"{name}_seq_masked_fraction", x.segments.lengths(rejected) > 0, x.present)


def _rejection_summary(
    summary: Summary, name: str, x: CorrectionInputs, option: Rejection, divergence: Tensor, bounds: Bounds
) -> None:
    two_sided = bounds.lower is not None
    lower = bounds.lower if two_sided else 0.0
    if option.per_sequence:
        by_token, by_sequence, over = x.segments.expand(divergence), divergence, x.present
    else:
        by_token, by_sequence, over = divergence, x.segments.mean(divergence, x.mask), x.mask
    below = divergence < lower if two_sided else torch.zeros_like(divergence, dtype=torch.bool)
    summary.mean(f"{name}_mean", by_token, x.mask)
    summary.std(f"{name}_std", by_token.clamp(lower, bounds.upper), x.mask, unbiased=False)
    summary.largest(f"{name}_max", divergence, over)
    summary.smallest(f"{name}_min", divergence, over)
    summary.mean(f"{name}_fraction_high", divergence > bounds.upper, over)
    summary.mean(f"{name}_fraction_low", below, over)
    summary.mean(f"{name}_seq_mean", by_sequence, x.present)
    summary.std(f"{name}_seq_std", by_sequence, x.present, unbiased=True)
    summary.largest(f"{name}_seq_max", by_sequence, x.present)
    summary.smallest(f"{name}_seq_min", by_sequence, x.present)
    summary.largest(f"{name}_seq_max_deviation", by_sequence.abs(), x.present)
    summary.mean(f"{name}_seq_fraction_high", by_sequence > bounds.upper, x.present)
    if two_sided:
        summary.mean(f"{name}_seq_fraction_low", by_sequence < lower, x.present)


def off_policy_summary(x: CorrectionInputs) -> Reduced:
    """How far pi_train is from the policy that generated: perplexities, KL estimates, chi-square."""
    summary, mask, present, mean = Summary(), x.mask, x.present, x.segments.mean
    log_ratio = x.log_ratio
    train, rollout = mean(x.log_probs.double(), mask), mean(x.rollout_log_probs.double(), mask)
    difference = rollout - train
    summary.mean("training_ppl", (-train).exp(), present)
    summary.mean("training_log_ppl", -train, present)
    summary.mean("rollout_ppl", (-rollout).exp(), present)
    summary.mean("rollout_log_ppl", -rollout, present)
    summary.mean("kl", -log_ratio, mask)
    summary.mean("k3_kl", torch.expm1(clamped(log_ratio)) - log_ratio, mask)
    summary.mean("log_ppl_diff", difference, present)
    summary.mean("log_ppl_abs_diff", difference.abs(), present)
    summary.largest("log_ppl_diff_max", difference, present)
    summary.smallest("log_ppl_diff_min", difference, present)
    summary.mean("ppl_ratio", difference.exp(), present)
    summary.mean("chi2_token", (2 * clamped(log_ratio)).exp() - 1, mask)
    summary.mean("chi2_seq", (2 * clamped(x.segments.sum(log_ratio, mask))).exp() - 1, present)
    return summary.finish(x.reduction)
