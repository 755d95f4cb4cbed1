"""Importance weights and rejection."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algorithm.rollout_correction import REJECTIONS
from mppo.check_loss.simulated_ranks import on_simulated_ranks
from tests.unit.correction_cases import (
    OPTIONS,
    Rows,
    corrected,
    correction_batches,
    divergence_of,
    mean,
    part_of,
    with_ratios,
)
from tests.unit.samples import assignments, held_by

pytestmark = pytest.mark.unit

RATIOS = ([0.25, 1.5, 4.0], [0.5, 0.5])


def weights(x, **knobs):
    return corrected(x, **knobs).importance_weights.tolist()


def test_a_token_weighs_its_own_ratio_up_to_the_threshold():
    assert weights(with_ratios(*RATIOS), rollout_is="token") == pytest.approx([0.25, 1.5, 2.0, 0.5, 0.5])
    wide = weights(with_ratios(*RATIOS), rollout_is="token", rollout_is_threshold=5)
    assert wide == pytest.approx([0.25, 1.5, 4.0, 0.5, 0.5])


def test_a_sequence_weighs_the_product_of_its_ratios():
    assert weights(with_ratios(*RATIOS), rollout_is="sequence") == pytest.approx([1.5] * 3 + [0.25] * 2)
    assert weights(with_ratios(*RATIOS), rollout_is="sequence", rollout_is_threshold="1.2") == pytest.approx(
        [1.2] * 3 + [0.25] * 2
    )


def test_between_two_bounds_a_weight_is_kept_and_outside_it_is_zero():
    """IcePop; unlike truncation it drops what is too large, and what is too small as well. Nothing is rejected."""
    result = corrected(with_ratios(*RATIOS), rollout_is="token", rollout_is_threshold="0.4_3.0")
    assert result.importance_weights.tolist() == pytest.approx([0.0, 1.5, 0.0, 0.5, 0.5])
    assert result.kept.all()


@pytest.mark.parametrize("option", ["token", "sequence"])
@pytest.mark.parametrize(("log_ratio", "weight"), [(1000.0, exp(20)), (25.0, exp(20)), (-1000.0, exp(-20))])
def test_the_exponent_of_a_weight_is_clamped(option, log_ratio, weight):
    x = with_ratios([1.0])
    x = replace(x, log_probs=x.rollout_log_probs + log_ratio)
    assert weights(x, rollout_is=option, rollout_is_threshold=1e12) == pytest.approx([weight])


@given(correction_batches())
def test_what_the_mask_hides_neither_weighs_nor_trains_nor_counts(drawn):
    _, x = drawn
    knobs = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": "1.0,1.5"}
    hidden = replace(
        x,
        log_probs=torch.where(x.mask, x.log_probs, torch.nan),
        rollout_log_probs=torch.where(x.mask, x.rollout_log_probs, 1e6),
    )
    here, there = corrected(x, **knobs), corrected(hidden, **knobs)
    assert torch.equal(there.importance_weights, here.importance_weights)
    assert torch.equal(there.kept, here.kept)
    assert there.metrics == here.metrics
    assert (here.importance_weights[~x.mask] == 0).all()
    assert not here.kept[~x.mask].any()


def test_weights_are_normalised_over_the_tokens_that_are_kept():
    """Ratios 0.25, 1.5, 2 (of 4), 0.5, 0.5; the first is rejected, so the others have mean 1."""
    knobs = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.4_5.0"}
    result = corrected(with_ratios(*RATIOS), rollout_is_batch_normalize=True, **knobs)
    factor = (1.5 + 2.0 + 0.5 + 0.5) / 4
    assert result.kept.tolist() == [False, True, True, True, True]
    assert result.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor)
    assert result.importance_weights.tolist() == pytest.approx([w / factor for w in (0.25, 1.5, 2.0, 0.5, 0.5)])
    assert result.importance_weights[result.kept].mean().item() == pytest.approx(1.0)


def test_weights_of_sequences_are_normalised_over_the_sequences_that_are_kept():
    """Products 1.5, 0.25 and 3, of which the last is rejected; a sequence counts once, whatever its length."""
    knobs = {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.2_2.0"}
    x = with_ratios(*RATIOS, [3.0])
    result = corrected(x, rollout_is_batch_normalize=True, rollout_is_threshold=10, **knobs)
    factor = (1.5 + 0.25) / 2
    assert result.kept.tolist() == [True] * 5 + [False]
    assert result.importance_weights.tolist() == pytest.approx([1.5 / factor] * 3 + [0.25 / factor] * 2 + [3 / factor])


@pytest.mark.parametrize("option", ["token", "sequence"])
def test_weights_that_are_all_zero_or_rejected_are_left_as_they_are(option):
    zero = {"rollout_is": option, "rollout_is_threshold": "0.9_1.1", "rollout_is_batch_normalize": True}
    result = corrected(with_ratios([2.0], [2.0]), **zero)
    assert result.importance_weights.tolist() == [0.0, 0.0]
    assert result.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    rejecting = {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.1}
    result = corrected(with_ratios([2.0]), **{**zero, "rollout_is_threshold": 5.0}, **rejecting)
    assert (result.importance_weights.tolist(), result.kept.tolist()) == (pytest.approx([2.0]), [False])


def test_weights_come_in_the_type_of_the_log_probs():
    x = with_ratios(*RATIOS)
    assert (
        corrected(replace(x, log_probs=x.log_probs.float()), rollout_is="token").importance_weights.dtype
        == torch.float32
    )


def test_without_options_nothing_is_weighed_or_rejected():
    result = corrected(with_ratios(*RATIOS))
    assert result.importance_weights is None
    assert result.kept.all()


def bounds(option, low, high):
    """A threshold in terms of the ratio, or of the divergence, and what it allows of the divergence."""
    if option.endswith("k1"):
        return f"{exp(-high)}_{exp(-low)}", low, high
    return high, -1.0, high


@pytest.mark.parametrize("option", OPTIONS)
@settings(max_examples=10)
@given(correction_batches(), st.sampled_from([0.05, 0.2, 0.6]))
def test_an_option_rejects_by_its_formula(option, drawn, high):
    batch, x = drawn
    threshold, low, high = bounds(option, -0.7 * high, high)
    result = corrected(x, rollout_rs=option, rollout_rs_threshold=threshold)
    kept = [low <= d <= high for row in Rows(batch, x).log_ratios for d in divergence_of(option, row)]
    assert result.kept[x.mask].tolist() == kept
    assert not result.kept[~x.mask].any()


def test_the_eleven_options_of_the_reference_are_all_there():
    assert sorted(OPTIONS) == sorted(set(OPTIONS) & set(REJECTIONS.names()))
    assert len(OPTIONS) == 11


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [("0.1_1.2", [True, True, False]), ("0.5_3.0", [False, True, True]), (3.0, [True, True, True])],
)
def test_bounds_of_k1_are_bounds_of_the_ratio(threshold, kept):
    """Of pi_train / pi_rollout: 0.4, 1 and 2.5; one number u stands for `1/u_u`."""
    x = with_ratios([0.4, 1.0, 2.5])
    assert corrected(x, rollout_rs="token_k1", rollout_rs_threshold=threshold).kept.tolist() == kept


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("seq_sum_k1", "0.1_1.2", [False] * 2 + [True] * 2 + [True]),  # products 1.5, 0.2 and 1
        ("seq_sum_k1", 2.0, [True] * 2 + [False] * 2 + [True]),
        ("seq_mean_k1", "0.9_1.2", [False] * 2 + [False] * 2 + [True]),  # roots 1.22, 0.45 and 1
        ("seq_max_k2", log(4.0) ** 2 / 2 - 0.01, [True] * 2 + [False] * 2 + [True]),  # ratios up to 3, 4 times and 1
    ],
)
def test_an_option_of_sequences_rejects_them_whole(option, threshold, kept):
    x = with_ratios([0.5, 3.0], [0.25, 0.8], [1.0])
    assert corrected(x, rollout_rs=option, rollout_rs_threshold=threshold).kept.tolist() == kept


@given(correction_batches(), st.lists(st.sampled_from(OPTIONS), min_size=2, max_size=4, unique=True))
def test_a_token_trains_only_if_every_option_keeps_it(drawn, options):
    _, x = drawn
    thresholds = [bounds(option, -0.3, 0.4)[0] for option in options]
    together = corrected(x, rollout_rs=", ".join(options), rollout_rs_threshold=",".join(str(t) for t in thresholds))
    kept = x.mask.clone()
    for option, threshold in zip(options, thresholds, strict=True):
        kept &= corrected(x, rollout_rs=option, rollout_rs_threshold=threshold).kept
    assert torch.equal(together.kept, kept)


def test_one_threshold_serves_all_options():
    x = with_ratios([1.0, 1.9], [1.0, 1.0])
    shared = corrected(x, rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold=0.22)
    each = corrected(x, rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="0.22,0.22")
    assert shared.kept.tolist() == each.kept.tolist() == [False, False, True, True]
    apart = corrected(x, rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="0.2,0.3")
    assert apart.kept.tolist() == [True, False, True, True]


def above_three_quarters(log_ratio, mask, segments):
    return (log_ratio.exp() > 0.75).double() + 0.5


def test_an_option_may_come_from_an_import_path():
    x, option = with_ratios([0.5, 1.0, 0.7]), f"{__name__}:above_three_quarters"
    assert corrected(x, rollout_rs=option, rollout_rs_threshold=1.0).kept.tolist() == [True, False, True]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("option", ["token", "sequence"])
@settings(max_examples=10)
@given(correction_batches(), st.data())
def test_the_cut_over_ranks_changes_neither_weights_nor_rejection(option, normalize, drawn, data):
    """Unequal parts, one of which may be empty."""
    batch, x = drawn
    knobs = {"rollout_is": option, "rollout_rs": "seq_mean_k3,token_k2", "rollout_rs_threshold": 0.15}
    knobs["rollout_is_batch_normalize"] = normalize
    pieces = [batch.select(rows) for rows in held_by(data.draw(assignments(len(batch.lengths))))]
    parts = on_simulated_ranks(pieces, lambda piece, reduction: corrected(part_of(x, piece, reduction), **knobs))
    whole, origins = corrected(x, **knobs), [piece.origin for piece in pieces]
    assert torch.equal(batch.gather_back(origins, [part.kept for part in parts]), whole.kept)
    torch.testing.assert_close(
        batch.gather_back(origins, [part.importance_weights for part in parts]), whole.importance_weights
    )


@given(correction_batches())
def test_after_normalising_the_weights_that_train_have_mean_1(drawn):
    _, x = drawn
    result = corrected(
        x, rollout_is="token", rollout_is_batch_normalize=True, rollout_rs="token_k2", rollout_rs_threshold=0.3
    )
    kept = result.importance_weights[result.kept].tolist()
    assert mean(kept) == pytest.approx(1.0 if kept else 0.0)
