"""The knobs of the rollout correction: presets, thresholds, and what is refused."""

from math import log

import pytest

from mppo.algorithm.rollout_correction import RolloutCorrectionConfig, preset_names, rollout_correction_config
from mppo.algorithm.rollout_correction.config import Bounds
from mppo.errors import ConfigError

pytestmark = pytest.mark.unit

WHERE = r"algorithm\.rollout_correction\."
GEOMETRIC = ("seq_mean_k1", "0.999_1.001")
K3 = ("seq_mean_k3", 0.01)
PRESETS = {  # rollout_is and its threshold; rollout_rs and its threshold; bypass_mode; loss_type
    "disabled": (None, 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_is": ("token", 2.0, None, None, False, "ppo_clip"),
    "decoupled_seq_is": ("sequence", 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None, False, "ppo_clip"),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0", False, "ppo_clip"),
    "decoupled_geo_rs": (None, 2.0, *GEOMETRIC, False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, *GEOMETRIC, False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, *GEOMETRIC, False, "ppo_clip"),
    "decoupled_k3_rs": (None, 2.0, *K3, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, *K3, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": ("token", 2.0, *K3, False, "ppo_clip"),
    "bypass_ppo_clip": (None, 2.0, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, *GEOMETRIC, True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, *K3, True, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None, True, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, *GEOMETRIC, True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, *GEOMETRIC, True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, *GEOMETRIC, True, "reinforce"),
}
FIELDS = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_for_its_fields(name):
    config = rollout_correction_config({"preset": name})
    assert tuple(getattr(config, field) for field in FIELDS) == PRESETS[name]


def test_every_preset_of_the_reference_is_there_and_no_other():
    assert sorted(preset_names()) == sorted(PRESETS)


def test_fields_beside_a_preset_win():
    config = rollout_correction_config({"preset": "decoupled_geo_rs", "rollout_rs_threshold": "0.99_1.01"})
    assert (config.rollout_rs, config.rollout_rs_threshold) == ("seq_mean_k1", "0.99_1.01")


def test_by_default_nothing_is_corrected():
    assert rollout_correction_config({}) == RolloutCorrectionConfig()
    assert RolloutCorrectionConfig().rs_bounds == {}


@pytest.mark.parametrize(
    ("threshold", "bounds"),
    [
        (2.0, Bounds(2.0)),
        (3, Bounds(3.0)),
        ("2.5", Bounds(2.5)),
        ("0.5_5.0", Bounds(5.0, 0.5)),
        (" 0.5_5 ", Bounds(5.0, 0.5)),
        ([0.5, 5], Bounds(5.0, 0.5)),
        ("2_2", Bounds(2.0, 2.0)),
    ],
)
def test_a_threshold_of_weights_is_a_number_or_two_bounds(threshold, bounds):
    config = rollout_correction_config({"rollout_is": "token", "rollout_is_threshold": threshold})
    assert config.is_bounds == bounds


@pytest.mark.parametrize(
    ("option", "threshold", "lower", "upper"),
    [
        ("token_k1", "0.5_4.0", -log(4.0), log(2.0)),
        ("seq_sum_k1", 2.0, -log(2.0), log(2.0)),
        ("seq_mean_k1", "1", 0.0, 0.0),
        ("seq_sum_k1", [0.5, 4.0], -log(4.0), log(2.0)),
        ("token_k2", 0.3, None, 0.3),
        ("seq_max_k3", "0.01", None, 0.01),
    ],
)
def test_bounds_of_rejection_are_of_the_divergence(option, threshold, lower, upper):
    """The bounds of the ratio turn round: k1 is the negative log-ratio."""
    ((name, bounds),) = rollout_correction_config(
        {"rollout_rs": option, "rollout_rs_threshold": threshold}
    ).rs_bounds.items()
    assert (name, bounds.upper) == (option, pytest.approx(upper))
    assert bounds.lower == (None if lower is None else pytest.approx(lower))


def test_each_option_has_its_own_threshold_in_order():
    config = rollout_correction_config({"rollout_rs": "token_k2, seq_max_k3", "rollout_rs_threshold": "0.3,0.5"})
    assert [(name, bounds.upper) for name, bounds in config.rs_bounds.items()] == [
        ("token_k2", 0.3),
        ("seq_max_k3", 0.5),
    ]


def test_an_option_that_is_named_twice_counts_once():
    config = rollout_correction_config({"rollout_rs": "token_k2,token_k1,token_k2", "rollout_rs_threshold": "2,3"})
    assert [(name, bounds.upper) for name, bounds in config.rs_bounds.items()] == [
        ("token_k2", 2.0),
        ("token_k1", log(3)),
    ]


@pytest.mark.parametrize(
    "threshold",
    [True, None, "wide", "1_2_3", "", "_2", 0, -1.0, "0_2", "2_1", "nan", "inf", [], [1.0, 2.0, 3.0], [2.0, 1.0]],
)
def test_a_threshold_of_weights_that_cannot_be_is_refused(threshold):
    with pytest.raises(ConfigError, match=WHERE + "rollout_is_threshold is .*; give a number, or bounds as in"):
        rollout_correction_config({"rollout_is": "token", "rollout_is_threshold": threshold})


@pytest.mark.parametrize("threshold", [0.9, "0.5", "0.2_0.9", [0.2, 0.9]])
def test_a_threshold_that_would_cut_the_weight_of_what_is_on_policy_is_refused(threshold):
    with pytest.raises(ConfigError, match=WHERE + "rollout_is_threshold is .*; weights are 1 on policy"):
        rollout_correction_config({"rollout_is": "token", "rollout_is_threshold": threshold})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold is null; rollout_rs=token_k1 needs it"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": True}, "rollout_rs_threshold of token_k1 is True"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, ".*of token_k1 is 0.5; .*must be at least 1"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.5"}, ".*of token_k2 .*only an upper bound"),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.1_0.5"}, ".*of seq_mean_k3 .*only an upper bound"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": -0.1}, ".*of token_k2 is -0.1; .*positive"),
        (
            {"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"},
            "rollout_rs_threshold has 3 thresholds for 2 options",
        ),
        ({"rollout_rs": " , ", "rollout_rs_threshold": 1.0}, "rollout_rs is empty"),
    ],
)
def test_a_rejection_that_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=WHERE + message):
        rollout_correction_config(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_is": "tokens"}, "importance weight 'tokens'.*did you mean 'token'"),
        (
            {"rollout_rs": "seq_mean_k4", "rollout_rs_threshold": 1.0},
            "rejection option 'seq_mean_k4'.*did you mean 'seq_mean_k",
        ),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0}, "unknown rejection option 'seq_max_k1'"),
        (
            {"preset": "decoupled_seq"},
            WHERE + "preset: unknown preset 'decoupled_seq'.*did you mean 'decoupled_seq_is'",
        ),
        ({"rollout_iss": "token"}, WHERE + "rollout_iss: .*did you mean 'rollout_is'"),
        ({"loss_type": "ppo", "bypass_mode": True}, WHERE + "loss_type is 'ppo'; choose one of ppo_clip, reinforce"),
        ({"denominator": "all"}, WHERE + "denominator is 'all'; choose one of loss_mask, kept"),
        ({"rollout_is": "token", "apply_to": ["policy", "value"]}, WHERE + "apply_to is 'value'"),
        ({"rollout_is": "token", "apply_to": ["kl"]}, WHERE + "apply_to must hold policy"),
        ({"bypass_mode": "perhaps"}, WHERE + "bypass_mode: "),
    ],
)
def test_what_is_unknown_is_named_with_the_nearest(given, message):
    with pytest.raises(ConfigError, match=message):
        rollout_correction_config(given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"rollout_is_threshold": 3.0}, "rollout_is_threshold"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize"),
        ({"apply_to": ["policy", "kl"]}, "apply_to"),
        ({"rollout_rs_threshold": 1.5}, "rollout_rs_threshold"),
        ({"loss_type": "reinforce"}, "loss_type"),
        ({"bypass_mode": True, "rollout_is": "token"}, "rollout_is"),
        ({"preset": "bypass_ppo_clip", "rollout_is": "sequence"}, "rollout_is"),
    ],
)
def test_a_field_that_would_have_no_effect_is_refused(given, name):
    with pytest.raises(ConfigError, match=WHERE + f"{name} is set but would have no effect"):
        rollout_correction_config(given)


def test_in_bypass_mode_reinforce_takes_importance_weights():
    config = rollout_correction_config({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"})
    assert (config.rollout_is, config.loss_type) == ("token", "reinforce")
