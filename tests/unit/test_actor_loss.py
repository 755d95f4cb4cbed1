"""How the actor's loss is put together."""

from dataclasses import replace
from math import exp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mppo.algorithm.actor_loss import ActorTerms, actor_loss
from mppo.algorithm.aggregation import token_weights
from mppo.algorithm.policy_losses import PolicyLoss, policy_loss
from mppo.algorithm.statistics import add_up
from mppo.errors import ConfigError
from tests.unit.policy_cases import counts_of, mini_batches, policy_inputs, tokens
from tests.unit.samples import assignments, held_by, masked_sum, normals

pytestmark = pytest.mark.unit

GPG = policy_loss("gpg")
ENTROPY = torch.tensor([0.5, 2.0], dtype=torch.double)
WEIGHTS = torch.tensor([0.25, 0.75], dtype=torch.double)
"""Of the aggregation."""


def two_tokens(**others):
    """Log-probs -1 and -2, advantages 2 and -1, references 0.5 below and 0.25 above: `-A log p` is 2 and -2."""
    x = tokens([0.0, -1.0], [2.0, -1.0], old=-1.0, **others)
    return replace(x, ref_log_probs=torch.tensor([-1.5, -1.75], dtype=torch.double))


def evaluated(terms, x=None, **others):
    """Token losses, and the metrics as numbers."""
    loss, statistics = actor_loss(x or two_tokens(), WEIGHTS, terms, ENTROPY, **others)
    return loss.tolist(), {name: ratio.value for name, ratio in statistics.items()}


def test_it_is_the_policy_loss_less_an_entropy_bonus_plus_a_penalty():
    terms = ActorTerms(GPG, entropy_coeff=0.1, kl_loss_coef=0.2, kl_loss_type="k1")
    loss, metrics = evaluated(terms)
    assert loss == pytest.approx([2 - 0.1 * 0.5 + 0.2 * 0.5, -2 - 0.1 * 2 + 0.2 * -0.25])
    assert metrics["pg_loss"] == pytest.approx(0.25 * 2 - 0.75 * 2)
    assert metrics["entropy_loss"] == pytest.approx(0.25 * 0.5 + 0.75 * 2.0)
    assert metrics["kl_loss"] == pytest.approx(0.25 * 0.5 - 0.75 * 0.25)
    total = metrics["pg_loss"] - 0.1 * metrics["entropy_loss"] + 0.2 * metrics["kl_loss"]
    assert metrics["loss"] == pytest.approx(total)
    assert metrics["entropy"] == pytest.approx(1.25)  # the plain mean over tokens, whatever the mode


def test_without_entropy_and_reference_it_is_the_policy_loss():
    loss, metrics = evaluated(ActorTerms(GPG))
    assert loss == [2.0, -2.0]
    assert metrics["loss"] == metrics["pg_loss"]
    assert set(metrics) == {"pg_loss", "loss", "ratio_deviation", "log_ratio_saturated"}


def test_entropy_may_be_reported_without_being_sought():
    loss, metrics = evaluated(ActorTerms(GPG, report_entropy=True))
    assert loss == [2.0, -2.0]
    assert (metrics["entropy"], metrics["entropy_loss"]) == (1.25, 1.625)


def test_a_penalty_of_coefficient_0_is_reported():
    loss, metrics = evaluated(ActorTerms(GPG, kl_loss_coef=0.0, kl_loss_type="k2"))
    assert loss == [2.0, -2.0]
    assert metrics["kl_loss"] == pytest.approx(0.25 * 0.125 + 0.75 * 0.03125)


def test_each_term_brings_its_gradient():
    """Of the log-prob `-A` and `coef` (k1); of the entropy `-coeff`."""
    x, entropy = two_tokens(), ENTROPY.clone().requires_grad_()
    terms = ActorTerms(GPG, entropy_coeff=0.1, kl_loss_coef=0.2, kl_loss_type="k1")
    loss, _ = actor_loss(x, WEIGHTS, terms, entropy)
    loss.sum().backward()
    assert x.log_probs.grad.tolist() == pytest.approx([-2 + 0.2, 1 + 0.2])
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1])


def test_full_kl_is_taken_as_it_is_given():
    terms = ActorTerms(GPG, kl_loss_coef=0.5, kl_loss_type="full")
    loss, metrics = evaluated(terms, full_kl=torch.tensor([0.4, 0.8], dtype=torch.double))
    assert loss == pytest.approx([2.2, -1.6])
    assert metrics["kl_loss"] == pytest.approx(0.25 * 0.4 + 0.75 * 0.8)
    assert "kl_saturated" not in metrics


@pytest.mark.parametrize(("form", "reported"), [("k3", True), ("low_var_kl", True), ("k3+", False), ("k1", False)])
def test_tokens_whose_penalty_is_saturated_are_counted(form, reported):
    x = replace(two_tokens(), ref_log_probs=torch.tensor([-1.5, 3.0], dtype=torch.double))  # d = 0.5 and -5
    _, metrics = evaluated(ActorTerms(GPG, kl_loss_coef=0.1, kl_loss_type=form), x)
    assert metrics.get("kl_saturated") == (0.5 if reported else None)


@pytest.mark.parametrize("extra", [(), ("kl",), ("entropy",), ("kl", "entropy")])
def test_importance_weights_multiply_the_policy_term_and_by_choice_the_others(extra):
    x = two_tokens(rollout_is_weights=torch.tensor([3.0, 0.25], dtype=torch.double))
    terms = ActorTerms(GPG, 0.1, kl_loss_coef=0.2, kl_loss_type="k1", importance_weighted=("policy", *extra))
    on_kl, on_entropy = ([3.0, 0.25] if term in extra else [1.0, 1.0] for term in ("kl", "entropy"))
    loss, metrics = evaluated(terms, x)
    kl, bonus = [0.5 * on_kl[0], -0.25 * on_kl[1]], [0.5 * on_entropy[0], 2.0 * on_entropy[1]]
    assert loss == pytest.approx([3 * 2 - 0.1 * bonus[0] + 0.2 * kl[0], 0.25 * -2 - 0.1 * bonus[1] + 0.2 * kl[1]])
    assert metrics["pg_loss"] == pytest.approx(0.25 * 6 - 0.75 * 0.5)
    assert metrics["kl_loss"] == pytest.approx(0.25 * kl[0] + 0.75 * kl[1])
    assert metrics["entropy_loss"] == pytest.approx(0.25 * bonus[0] + 0.75 * bonus[1])
    assert metrics["entropy"] == pytest.approx(1.25)


def test_weights_of_kl_are_harmless_where_there_are_none():
    terms = ActorTerms(GPG, 0.1, kl_loss_coef=0.2, kl_loss_type="k1")
    everywhere = replace(terms, importance_weighted=("policy", "kl", "entropy"))
    assert evaluated(everywhere) == evaluated(terms)


def full_terms():
    return ActorTerms(policy_loss("vanilla"), entropy_coeff=0.1, kl_loss_coef=0.2, kl_loss_type="low_var_kl")


@given(mini_batches(), st.data())
def test_losses_add_up_and_ratios_stay_over_uneven_micro_batches(mini_batch, data):
    batch, log_probs = mini_batch
    entropy, reference = data.draw(normals(2, len(batch)))
    batch = batch.with_fields(ref_log_probs=log_probs + reference)
    counts = counts_of(batch)

    def metrics(piece, places):
        weights = token_weights("seq-mean-token-mean", piece.mask, piece.segments, counts, 7.0)
        x = policy_inputs(piece, log_probs[places], ref_log_probs=piece["ref_log_probs"])
        return actor_loss(x, weights, full_terms(), entropy[places])[1]

    whole = metrics(batch, torch.arange(len(batch)))
    pieces = [batch.select(rows) for rows in held_by(data.draw(assignments(len(batch.lengths))))]
    total = add_up([metrics(piece, piece.origin) for piece in pieces])
    assert {n: r.value for n, r in total.items()} == pytest.approx({n: r.value for n, r in whole.items()})


@given(mini_batches(), st.data())
def test_what_the_mask_hides_reaches_no_term(mini_batch, data):
    batch, log_probs = mini_batch
    others = data.draw(normals(2, len(batch)))
    weights = token_weights("token-mean", batch.mask, batch.segments, counts_of(batch), 7.0)

    def evaluate(entropy, reference):
        leaf, entropy = log_probs.clone().requires_grad_(), entropy.clone().requires_grad_()
        x = policy_inputs(batch, leaf, ref_log_probs=reference)
        loss, statistics = actor_loss(x, weights, full_terms(), entropy)
        total = masked_sum(loss, batch.mask, weights)
        total.backward()
        gradient = leaf.grad[batch.mask], entropy.grad[batch.mask]
        return total.item(), [g.tolist() for g in gradient], {n: r.value for n, r in statistics.items()}

    assert evaluate(*torch.where(batch.mask, others, torch.nan)) == evaluate(*others)


def test_metrics_carry_no_gradient():
    _, statistics = actor_loss(two_tokens(), WEIGHTS, full_terms(), ENTROPY)
    assert not any(s.total.requires_grad for s in statistics.values())


def test_a_policy_loss_that_returns_a_mean_is_refused():
    with pytest.raises(ConfigError, match="policy loss 'mine'"):
        evaluated(ActorTerms(PolicyLoss("mine", lambda x: replace(GPG.fn(x), loss=x.log_probs.mean()))))


@pytest.mark.parametrize(("form", "penalty"), [("k1", [0.5, -0.25]), ("k2", [0.125, 0.03125]), ("abs", [0.5, 0.25])])
def test_the_penalty_has_the_form_that_is_asked_for(form, penalty):
    loss, _ = evaluated(ActorTerms(GPG, kl_loss_coef=1.0, kl_loss_type=form))
    assert loss == pytest.approx([2 + penalty[0], -2 + penalty[1]])


def test_by_default_the_penalty_is_the_low_variance_one():
    loss, _ = evaluated(ActorTerms(GPG, kl_loss_coef=1.0))
    assert loss == pytest.approx([2 + exp(-0.5) + 0.5 - 1, -2 + exp(0.25) - 0.25 - 1])


@pytest.mark.parametrize(
    ("terms", "missing"),
    [
        (ActorTerms(GPG, entropy_coeff=0.1), "the entropy"),
        (ActorTerms(GPG, kl_loss_coef=0.1), "ref_log_probs"),
        (ActorTerms(GPG, kl_loss_coef=0.1, kl_loss_type="full"), "the exact KL"),
    ],
)
def test_what_a_term_is_made_of_must_be_given(terms, missing):
    with pytest.raises(ConfigError, match=f"a term of {missing}, which is not given"):
        actor_loss(replace(two_tokens(), ref_log_probs=None), WEIGHTS, terms)
