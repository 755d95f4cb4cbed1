"""Estimators are examined before anything is launched, and plugins of all kinds are called as they will be."""

import pytest
import torch

from mppo.algorithm.advantages import ESTIMATORS, Advantages
from mppo.algorithm.advantages.estimator_contract import Estimator, EstimatorTraits, estimator
from mppo.algorithm.advantages.estimator_probe import probe_estimator
from mppo.cli.compose import load_config
from mppo.errors import ConfigError
from mppo.trainer.run_spec import make_run_spec

pytestmark = pytest.mark.unit

KNOBS = {"gdpo": {"gdpo_reward_keys": ["right", "brief"]}}
HERE = "tests.unit.test_estimator_probe"


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_every_registered_estimator_declares_what_it_reads(name):
    probe_estimator(estimator(name, KNOBS.get(name)))


def scored(x):
    advantages = x.to_tokens(x.scores)
    return Advantages(advantages, advantages)


def two_arguments(rewards, mask):
    return scored(rewards)


def with_a_config(x, config):
    return scored(x)


def group_mean(x):
    mean = x.per_group(x.scores) / x.per_group(torch.ones_like(x.scores))
    advantages = x.to_tokens(x.scores - mean[x.groups])
    return Advantages(advantages, advantages)


def reads_values(x):
    return Advantages(x.rewards - x.values, x.rewards)


def needs_values(x):
    return Advantages(x.rewards - x.need("values"), x.rewards)


def reads_old_log_probs(x):
    return Advantages(x.rewards * x.old_log_probs.exp(), x.rewards)


def a_tuple(x):
    return x.rewards, x.rewards


def per_trajectory(x):
    return Advantages(x.scores, x.scores)


def not_finite(x):
    return Advantages(x.rewards / 0.0, x.rewards)


def whole_numbers(x):
    return Advantages(x.rewards.long(), x.rewards)


def raises(x):
    raise KeyError("nothing here")


WRONG = [
    (two_arguments, "cannot be called with the inputs alone .*its signature must be"),
    (with_a_config, "cannot be called with the inputs alone"),
    (group_mean, "reads groups and did not say so: register it with groups=True"),
    (reads_values, "reads values and did not say so: register it with critic=True"),
    (needs_values, "an estimator that reads values must be registered with critic=True"),
    (reads_old_log_probs, "reads old_log_probs and did not say so: register it with reads_old_policy=True"),
    (a_tuple, "returned a tuple, not Advantages"),
    (per_trajectory, "one number per token is needed"),
    (not_finite, "no finite numbers"),
    (whole_numbers, "torch.int64 that are no finite numbers"),
    (raises, "raised on a small batch: KeyError"),
]


@pytest.mark.parametrize(("fn", "said"), WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_a_wrong_estimator_is_refused_at_the_start(fn, said):
    with pytest.raises(ConfigError, match=said):
        make_run_spec(load_config("class", [f"algorithm.adv_estimator={HERE}:{fn.__name__}"]), 1)


def test_what_is_declared_is_brought():
    probe_estimator(Estimator("mine", group_mean, EstimatorTraits(groups=True)))
    probe_estimator(Estimator("mine", reads_values, EstimatorTraits(critic=True)))
    probe_estimator(Estimator("mine", scored))


def two_samples(sample, other):
    return 1.0


def generator_of_size(size):
    return []


def engine_of_nothing():
    return None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            f"reward.function={HERE}:two_samples",
            "reward .*two_samples' has the signature .*is called with .sample: Sample",
        ),
        (f"data.train.generator={HERE}:generator_of_size", "prompt generator .*missing a required argument: 'size'"),
        (f"rollout.engine={HERE}:engine_of_nothing", "rollout engine .*is called with .config: Config, model"),
    ],
)
def test_a_plugin_that_cannot_be_called_is_refused_at_the_start(override, said):
    with pytest.raises(ConfigError, match=said):
        make_run_spec(load_config("class", [override]), 1)
