"""How a policy loss is found, configured and called."""

import math

import pytest
import torch

from mppo.algorithm.policy_losses import (
    POLICY_LOSSES,
    MiniBatchInputs,
    PolicyLoss,
    PolicyLossTraits,
    TokenLosses,
    anchor_statistics,
    policy_loss,
)
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError
from tests.unit.policy_cases import tokens

pytestmark = pytest.mark.unit

REFERENCE = [
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "reinforce",
    "sapo",
    "vanilla",
]


def test_the_ratio_of_probabilities():
    """Section 3.1: log-prob -1.2 before, -1.0 now; above 1 the action became likelier, below 1 less likely."""
    likelier, same, less_likely = tokens([0.2, 0.0, -0.2], [0.0] * 3).log_ratio.exp().tolist()
    assert likelier == pytest.approx(math.exp(0.2)) == pytest.approx(1.221, abs=5e-4)
    assert same == 1.0
    assert less_likely == pytest.approx(1 / likelier)


def test_the_log_ratio_is_clamped_and_has_no_gradient_beyond():
    """Section 3."""
    x = tokens([-1000.0, -20.5, -19.5, 19.5, 20.5, 1000.0], [1.0] * 6)
    x.log_ratio.sum().backward()
    assert x.log_ratio.tolist() == pytest.approx([-20, -20, -19.5, 19.5, 20, 20])
    assert x.log_probs.grad.tolist() == [0, 0, 1, 1, 0, 0]
    assert anchor_statistics(x)["log_ratio_saturated"].reduce(x.mask).value == pytest.approx(4 / 6)


def test_each_loss_brings_the_aggregation_mode_of_its_paper():
    modes = {name: policy_loss(name, {"dro_beta": 1.0} if name == "dro" else {}).loss_agg_mode for name in REFERENCE}
    per_sequence = {name: mode for name, mode in modes.items() if mode != "token-mean"}
    assert per_sequence == {
        "geo_mean": "seq-mean-token-mean",
        "gspo": "seq-mean-token-mean",
        "sapo": "seq-mean-token-mean",
        "reinforce": "seq-mean-token-sum",
    }


def test_the_losses_of_the_reference_are_all_there():
    assert set(REFERENCE) <= set(POLICY_LOSSES.names())


def mine(x):
    return TokenLosses(x.log_probs.square(), {"mine": TokenStatistic(x.advantages)})


def test_a_loss_may_come_from_an_import_path_and_reports_the_anchor_as_well():
    loss, x = policy_loss(f"{__name__}:mine"), tokens([0.0, 0.1], [1.0, 3.0], old=-1.0)
    result = loss(x)
    assert result.loss.tolist() == pytest.approx([1.0, 0.81])
    assert set(result.statistics) == {"mine", "ratio_deviation", "log_ratio_saturated"}
    assert loss.loss_agg_mode == "token-mean"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.log_probs, "returned a Tensor; .*TokenLosses"),
        (lambda x: (x.log_probs, {}), "returned a tuple"),
        (lambda x: None, "returned a NoneType"),
        (lambda x: TokenLosses(x.log_probs.mean()), r"returned loss of shape \[\] \(a mean\?"),
        (lambda x: TokenLosses(0.0), "returned loss of shape float"),
        (lambda x: TokenLosses(x.log_probs[:2]), r"returned loss of shape \[2\]; .*per token, \[3\]"),
        (lambda x: TokenLosses(x.log_probs[None]), r"returned loss of shape \[1, 3\]"),
        (lambda x: TokenLosses(x.log_probs, {"kl": TokenStatistic(x.log_probs.mean())}), r"returned kl of shape \[\]"),
    ],
)
def test_a_loss_that_does_not_return_one_number_per_token_is_refused(returned, message):
    with pytest.raises(ConfigError, match=f"policy loss 'mine' {message}"):
        PolicyLoss("mine", returned)(tokens([0.0] * 3, [1.0] * 3))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_is_not_called_without_what_it_prepares(name):
    with pytest.raises(ConfigError, match=f"policy loss '{name}' needs what its prepare finds"):
        policy_loss(name)(tokens([0.0], [1.0]))


@pytest.mark.parametrize(("found", "shape"), [(torch.zeros(2), r"\[2\]"), (torch.zeros(()), r"\[\]"), (0.5, "float")])
def test_what_a_loss_prepares_is_one_entry_per_token(found, shape):
    x = tokens([0.0] * 3, [1.0] * 3)
    mini_batch = MiniBatchInputs(
        x.log_probs.detach(), x.old_log_probs, x.advantages, x.mask, x.segments, torch.arange(3), seed=0
    )
    loss = PolicyLoss("mine", mine, PolicyLossTraits(prepare=lambda x: {"share": found}))
    with pytest.raises(ConfigError, match=f"prepare of policy loss 'mine' returned share of shape {shape}"):
        loss.prepare(mini_batch)


@pytest.mark.parametrize(
    ("name", "knobs", "named"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}, r"policy_loss\.clip_ratio_c is 1\.0"),
        ("vanilla", {"clip_ratio": -0.1}, r"policy_loss\.clip_ratio "),
        (
            "cispo",
            {"clip_ratio": 0.1, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
            r"policy_loss\.clip_ratio has no effect beside both clip_ratio_low and clip_ratio_high",
        ),
        ("gspo", {"clip_ratio_low": -0.1}, r"policy_loss\.clip_ratio_low is -0\.1"),
        ("cispo", {"clip_ratio_high": float("nan")}, r"policy_loss\.clip_ratio_high is nan"),
        ("dppo_tv", {"ratio_cap": 1.0}, r"policy_loss\.ratio_cap is 1\.0"),
        ("dppo_kl", {"clip_ratio": -1.0}, r"policy_loss\.clip_ratio is -1\.0"),
        ("sapo", {"tau_pos": 0.0}, r"policy_loss\.tau_pos is 0\.0"),
        ("sapo", {"tau_neg": -1.0}, r"policy_loss\.tau_neg is -1\.0"),
        ("dro", {}, r"policy_loss\.dro_beta is None"),
        ("dro", {"dro_beta": 0.0}, r"policy_loss\.dro_beta is 0\.0"),
        ("clip_cov", {"clip_cov_ratio": 0.0}, r"policy_loss\.clip_cov_ratio is 0\.0"),
        ("clip_cov", {"clip_cov_lb": 5.0}, r"policy_loss\.clip_cov_lb=5\.0 is not below clip_cov_ub=5\.0"),
        ("clip_cov", {"clip_ratio": -1.0}, r"policy_loss\.clip_ratio is -1\.0"),
        ("kl_cov", {"kl_cov_ratio": 1.1}, r"policy_loss\.kl_cov_ratio is 1\.1"),
        ("kl_cov", {"ppo_kl_coef": -0.1}, r"policy_loss\.ppo_kl_coef is -0\.1"),
        ("bypass_mode", {"loss_type": "ppo"}, "loss_type is 'ppo'; choose ppo_clip or reinforce"),
        ("bypass_mode", {"clip_ratio_c": 0.5}, r"policy_loss\.clip_ratio_c is 0\.5"),
    ],
)
def test_a_value_that_cannot_be_is_named(name, knobs, named):
    with pytest.raises(ConfigError, match=named):
        policy_loss(name, knobs)


@pytest.mark.parametrize(
    ("name", "knob", "hint"),
    [
        ("vanilla", "clip_range", "did you mean 'clip_ratio'"),
        ("dppo_tv", "clip_ratio_c", "ratio_cap"),
        ("cispo", "clip_ratio_c", "it reads clip_ratio, clip_ratio_low, clip_ratio_high"),
        ("gpg", "clip_ratio", "it has none"),
        ("kl_cov", "clip_ratio", "it reads kl_cov_ratio, ppo_kl_coef"),
    ],
)
def test_a_knob_that_the_loss_does_not_read_is_named(name, knob, hint):
    with pytest.raises(ConfigError, match=rf"actor\.policy_loss\.{knob}: '{name}' does not read this knob.*{hint}"):
        policy_loss(name, {knob: 0.2}, where="actor.policy_loss")


def test_an_unknown_loss_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="policy loss 'vanila'.*did you mean 'vanilla'"):
        policy_loss("vanila")
