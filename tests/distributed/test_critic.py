"""A critic works: PPO with GAE learns what REINFORCE with a batch-mean baseline does not, on the same task."""

import pytest

from tests.distributed.train_runs import train

pytestmark = pytest.mark.distributed

ON_TWO_RANKS = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "trainer.val_before_train=false",
)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    return train("offset", 2, tmp_path_factory.mktemp("ppo"), *ON_TWO_RANKS)


@pytest.fixture(scope="module")
def reinforce(tmp_path_factory):
    without_critic = ("algorithm.adv_estimator=reinforce_plus_plus", "~algorithm.adv_options.lam", "~critic")
    return train("offset", 2, tmp_path_factory.mktemp("reinforce"), *ON_TWO_RANKS, *without_critic)


def test_explained_variance_passes_0_8(ppo):
    assert min(ppo.column("critic/explained_variance")[-20:]) > 0.8


def test_ppo_with_a_critic_beats_reinforce(ppo, reinforce):
    assert ppo.column("val/accuracy")[-1] > 0.8
    assert reinforce.column("val/accuracy")[-1] < 0.2
