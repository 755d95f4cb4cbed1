"""The metrics `rollout_corr/*` against their formulas over plain lists."""

from dataclasses import replace
from math import exp, inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.rollout_correction import CorrectionInputs
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.correction_cases import (
    OPTIONS,
    Rows,
    corrected,
    correction_batches,
    divergence_of,
    mean,
    part_of,
    std,
    with_ratios,
)
from tests.unit.samples import assignments, held_by, segments_of

pytestmark = pytest.mark.unit

close = {"rel": 1e-6, "abs": 1e-7}


def metrics(x, **knobs):
    return {name.removeprefix("rollout_corr/"): value for name, value in corrected(x, **knobs).metrics.items()}


def largest(x):
    return max(x, default=0.0)


def smallest(x):
    return min(x, default=0.0)


def share(x, condition):
    return mean([condition(value) for value in x])


def square(x):
    return x * x


@given(correction_batches())
def test_how_far_the_trained_policy_is_from_the_one_that_generated(drawn):
    batch, x = drawn
    rows = Rows(batch, x)
    train, rollout = [mean(row) for row in rows.train], [mean(row) for row in rows.rollout]
    difference = [r - t for r, t in zip(rollout, train, strict=True)]
    assert metrics(x) == pytest.approx(
        {
            "training_ppl": mean([exp(-t) for t in train]),
            "training_log_ppl": mean([-t for t in train]),
            "rollout_ppl": mean([exp(-r) for r in rollout]),
            "rollout_log_ppl": mean([-r for r in rollout]),
            "kl": mean([-d for d in rows.tokens]),
            "log_prob_distance": mean([abs(d) for d in rows.tokens]),
            "k3_kl": mean([exp(d) - d - 1 for d in rows.tokens]),
            "log_ppl_diff": mean(difference),
            "log_ppl_abs_diff": mean([abs(d) for d in difference]),
            "log_ppl_diff_max": largest(difference),
            "log_ppl_diff_min": smallest(difference),
            "ppl_ratio": mean([exp(d) for d in difference]),
            "chi2_token": mean([square(exp(d)) - 1 for d in rows.tokens]),
            "chi2_seq": mean([square(exp(sum(row))) - 1 for row in rows.log_ratios]),
        },
        **close,
    )


def test_on_policy_nothing_diverges():
    """Two tokens of log-prob -1.5 each: perplexity e^1.5."""
    value = metrics(with_ratios([1.0, 1.0]))
    assert {name for name, number in value.items() if number != 0} == {
        "training_ppl",
        "training_log_ppl",
        "rollout_ppl",
        "rollout_log_ppl",
        "ppl_ratio",
    }
    assert value["training_ppl"] == value["rollout_ppl"] == pytest.approx(exp(1.5))
    assert value["ppl_ratio"] == 1.0


@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_whatever_is_exponentiated_is_clamped_to_20_before(log_ratio):
    x, clamp = with_ratios([1.0, 1.0]), 20.0 if log_ratio > 0 else -20.0
    x = replace(x, log_probs=x.rollout_log_probs + log_ratio)
    value = metrics(x, rollout_rs="token_k1,seq_sum_k2,seq_max_k3", rollout_rs_threshold=2.0)
    assert value["kl"] == -log_ratio
    assert value["k3_kl"] == pytest.approx(exp(clamp) - 1 - log_ratio)
    assert value["chi2_token"] == value["chi2_seq"] == pytest.approx(exp(2 * clamp) - 1)
    assert value["rollout_rs_token_k1_mean"] == -clamp
    assert value["rollout_rs_seq_sum_k2_max"] == 400.0
    assert value["rollout_rs_seq_max_k3_max"] == pytest.approx(exp(clamp) - 1 - clamp)


def of_weights(weights, raw, rows, low, high):
    """What every kind of weight reports; `weights` and `raw` are of tokens."""
    by_row, raw_by_row, at = [], [], 0
    for row in rows.log_ratios:
        by_row.append(mean(weights[at : at + len(row)]))
        raw_by_row.append(mean(raw[at : at + len(row)]))
        at += len(row)
    squares = mean([w * w for w in weights])
    return {
        "rollout_is_mean": mean(weights),
        "rollout_is_std": std(weights),
        "rollout_is_eff_sample_size": square(mean(weights)) / squares if squares else 0.0,
        "rollout_is_seq_mean": mean(by_row),
        "rollout_is_seq_std": std(by_row, ddof=1),
        "rollout_is_seq_max": largest(by_row),
        "rollout_is_seq_min": smallest(by_row),
        "rollout_is_seq_max_deviation": largest([abs(w - 1) for w in by_row]),
        "rollout_is_seq_fraction_high": share(raw_by_row, lambda w: w > high),
        "rollout_is_seq_fraction_low": share(raw_by_row, lambda w: w < low),
    }


def reported_weights(x, **knobs):
    return {name: value for name, value in metrics(x, **knobs).items() if name.startswith("rollout_is")}


@given(correction_batches())
def test_truncated_weights_of_tokens(drawn):
    batch, x = drawn
    rows = Rows(batch, x)
    raw = [exp(d) for d in rows.tokens]
    weights = [min(w, 1.3) for w in raw]
    expected = of_weights(weights, raw, rows, 1 / 1.3, 1.3) | {
        "rollout_is_max": largest(weights),
        "rollout_is_min": smallest(weights),
        "rollout_is_ratio_fraction_high": share(raw, lambda w: w > 1.3),
        "rollout_is_ratio_fraction_low": share(raw, lambda w: w < 1 / 1.3),
    }
    assert reported_weights(x, rollout_is="token", rollout_is_threshold=1.3) == pytest.approx(expected, **close)


@given(correction_batches())
def test_weights_of_tokens_that_are_zero_outside_the_band(drawn):
    batch, x = drawn
    rows = Rows(batch, x)
    raw = [exp(d) for d in rows.tokens]
    weights = [w if 0.8 <= w <= 1.6 else 0.0 for w in raw]
    expected = of_weights(weights, raw, rows, 0.8, 1.6) | {
        "rollout_is_max": largest(weights),
        "rollout_is_min": smallest(weights),
        "rollout_is_ratio_fraction_high": share(raw, lambda w: w > 1.6),
        "rollout_is_ratio_fraction_low": share(raw, lambda w: w < 0.8),
        "rollout_is_oob_ratio": share(raw, lambda w: not 0.8 <= w <= 1.6),
    }
    assert reported_weights(x, rollout_is="token", rollout_is_threshold="0.8_1.6") == pytest.approx(expected, **close)


@given(correction_batches())
def test_weights_of_sequences_report_extremes_before_truncation(drawn):
    batch, x = drawn
    rows = Rows(batch, x)
    products = [exp(sum(row)) for row in rows.log_ratios]
    raw = rows.expand(products)
    expected = of_weights([min(w, 1.3) for w in raw], raw, rows, 1 / 1.3, 1.3) | {
        "rollout_is_max": largest(products),
        "rollout_is_min": smallest(products),
        "rollout_is_ratio_fraction_high": share(products, lambda w: w > 1.3),
        "rollout_is_ratio_fraction_low": share(products, lambda w: w < 1 / 1.3),
    }
    assert reported_weights(x, rollout_is="sequence", rollout_is_threshold=1.3) == pytest.approx(expected, **close)


@pytest.mark.parametrize(("ratios", "share_left"), [([2.0, 2.0], 1.0), ([2.0, 0.02, 0.02, 0.02], 0.265)])
def test_the_effective_sample_size_is_the_share_that_the_weights_leave(ratios, share_left):
    value = reported_weights(with_ratios(ratios), rollout_is="token", rollout_is_threshold=5)
    assert value["rollout_is_eff_sample_size"] == pytest.approx(share_left, abs=1e-3)


@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=10)
@given(correction_batches())
def test_what_an_option_of_rejection_reports(option, drawn):
    batch, x = drawn
    two_sided, high = option.endswith("k1"), 0.25
    low = -0.15 if two_sided else -inf
    threshold = f"{exp(-high)}_{exp(-low)}" if two_sided else high
    of_rows = [divergence_of(option, row) for row in Rows(batch, x).log_ratios]
    tokens = [d for row in of_rows for d in row]
    by_row = [mean(row) for row in of_rows]
    values = tokens if option.startswith("token") else by_row
    lost = [any(not low <= d <= high for d in row) for row in of_rows]
    expected = {
        "mean": mean(tokens),
        "std": std([min(max(d, low if two_sided else 0.0), high) for d in tokens]),
        "max": largest(values),
        "min": smallest(values),
        "fraction_high": share(values, lambda d: d > high),
        "fraction_low": share(values, lambda d: d < low),
        "masked_fraction": share(tokens, lambda d: not low <= d <= high),
        "seq_masked_fraction": mean(lost),
        "seq_mean": mean(by_row),
        "seq_std": std(by_row, ddof=1),
        "seq_max": largest(by_row),
        "seq_min": smallest(by_row),
        "seq_max_deviation": largest([abs(d) for d in by_row]),
        "seq_fraction_high": share(by_row, lambda d: d > high),
    } | ({"seq_fraction_low": share(by_row, lambda d: d < low)} if two_sided else {})
    expected = {f"rollout_rs_{option}_{name}": value for name, value in expected.items()}
    overall = {name: expected[f"rollout_rs_{option}_{name}"] for name in ("masked_fraction", "seq_masked_fraction")}
    expected |= {f"rollout_rs_{name}": value for name, value in overall.items()}

    reported = metrics(x, rollout_rs=option, rollout_rs_threshold=threshold)
    rejection = {name: value for name, value in reported.items() if name.startswith("rollout_rs")}
    assert rejection == pytest.approx(expected, **close)


def test_what_several_options_reject_together():
    """k1 rejects the ratio 3, k3 (0.901 and 0.504) that and 0.3; one of the two trajectories loses tokens."""
    x = with_ratios([3.0, 0.3], [1.0, 1.0])
    value = metrics(x, rollout_rs="token_k1,token_k3", rollout_rs_threshold="0.2_2.0,0.5")
    fractions = {name: number for name, number in value.items() if name.endswith("masked_fraction")}
    assert fractions == {
        "rollout_rs_token_k1_masked_fraction": 1 / 4,
        "rollout_rs_token_k1_seq_masked_fraction": 1 / 2,
        "rollout_rs_token_k3_masked_fraction": 2 / 4,
        "rollout_rs_token_k3_seq_masked_fraction": 1 / 2,
        "rollout_rs_masked_fraction": 2 / 4,
        "rollout_rs_seq_masked_fraction": 1 / 2,
    }


EVERYTHING = {
    "rollout_is": "sequence",
    "rollout_is_batch_normalize": True,
    "rollout_rs": ",".join(OPTIONS),
    "rollout_rs_threshold": ",".join("1.8" if option.endswith("k1") else "0.3" for option in OPTIONS),
}


@settings(max_examples=10)
@given(correction_batches(), st.data(), st.sampled_from(["token", "sequence"]))
def test_every_rank_reports_the_metrics_of_the_whole_batch(drawn, data, rollout_is):
    """However unevenly it is cut; a rank may hold nothing."""
    batch, x = drawn
    knobs = {**EVERYTHING, "rollout_is": rollout_is}
    pieces = [batch.select(rows) for rows in held_by(data.draw(assignments(len(batch.lengths))))]
    parts = on_simulated_ranks(pieces, lambda piece, reduction: metrics(part_of(x, piece, reduction), **knobs))
    assert parts[0] == parts[1] == parts[2]
    assert parts[0] == pytest.approx(metrics(x, **knobs), **close)


def test_a_trajectory_without_actions_counts_nowhere():
    x = with_ratios([2.0, 0.5], [3.0])
    hole = torch.full((4,), 7.0, dtype=torch.double)
    with_empty = CorrectionInputs(
        torch.cat([x.log_probs[:2], hole, x.log_probs[2:]]),
        torch.cat([x.rollout_log_probs[:2], -hole, x.rollout_log_probs[2:]]),
        torch.tensor([True, True, False, False, False, False, True]),
        segments_of(2, 4, 0, 1),
    )
    assert metrics(with_empty, **EVERYTHING) == pytest.approx(metrics(x, **EVERYTHING))


def test_over_no_action_at_all_every_metric_is_zero():
    x = with_ratios([2.0, 0.5])
    value = metrics(replace(x, mask=torch.zeros(2, dtype=torch.bool)), **EVERYTHING)
    assert {name: number for name, number in value.items() if number != 0} == {"rollout_is_batch_norm_factor": 1.0}
