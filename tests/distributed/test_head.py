"""Log-probs, entropy, squares and exact KL from hidden states in chunks equal the dense ones, gradients included."""

import pytest

from mppo.megatron.head import TERMS
from tests.distributed.head_worker import HEAD_CASES, SLICED_LOSSES, worst_errors
from tests.distributed.ranks import call_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.quick]

RANKS = (1, 2, 3)


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"tp{ranks}")
def errors(request):
    return call_on_ranks(worst_errors, request.param)[0]


@pytest.mark.parametrize("case", [case for case in HEAD_CASES if case.dtype == "float64"], ids=lambda case: case.name)
def test_the_chunked_head_is_the_dense_one_in_float64(errors, case):
    found = errors[case.name]
    assert found.keys() == {"log_probs", *case.terms, "hidden_grad", "weight_grad"}
    assert max(found.values()) < 1e-9, found


def test_it_is_the_dense_one_in_float32(errors):
    found = next(errors[case.name] for case in HEAD_CASES if case.dtype == "float32" and case.nearness == 1.0)
    assert max(found.values()) < 5e-6, found


def test_bfloat16_rounds_logits_and_slopes_and_adds_up_in_float32(errors):
    """Errors are those of a few roundings, 2e-3 to 4e-3 each, whatever the number of tiles."""
    found = next(errors[case.name] for case in HEAD_CASES if case.dtype == "bfloat16" and not case.fp32_logits)
    assert max(found.values()) < 2e-2, found
    assert found["log_probs"] > 1e-4, "it rounds logits"


def test_with_fp32_logits_bfloat16_rounds_gradients_only(errors):
    """Log-probs, entropies and KLs of the same inputs are those of float32."""
    found = next(errors[case.name] for case in HEAD_CASES if case.fp32_logits)
    assert max(found[name] for name in ("log_probs", *TERMS)) < 5e-6, found
    assert max(found.values()) < 2e-2, found


def test_a_kl_far_below_the_rounding_of_a_log_prob_is_still_right(errors):
    """About 1e-6, from float32 logits that are off by 1e-6 themselves."""
    found = next(errors[case.name] for case in HEAD_CASES if case.dtype == "float32" and case.nearness == 1e-3)
    assert found["full_kl"] < 1e-2, found


@pytest.mark.parametrize("name", SLICED_LOSSES)
def test_trajectories_cut_over_ranks_give_the_loss_and_gradient_of_whole_ones(errors, name):
    """Through Segments, position by position: what context parallelism relies on."""
    assert max(errors[name].values()) < 1e-12, errors[name]


@pytest.mark.quick
def test_tokens_without_upstream_gradient_take_no_part_in_the_backward_pass(errors):
    assert errors["products"] == {"idle=3": 0.75, "idle=6": 0.5, "idle=12": 0.0}
