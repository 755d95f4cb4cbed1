"""What saves memory or time changes no number: recomputation, overlap, resting in host memory, no old-log-prob pass."""

import pytest

from tests.distributed.train_runs import train

pytestmark = pytest.mark.distributed

BASE = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "trainer.total_training_steps=3",
    "data.train_batch_size=8",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.old_log_prob_pass=always",
    "data.val.generator=null",
    "data.val.options={}",
    "trainer.test_freq=0",
    "trainer.save_hf=false",
)
CRITIC = ("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=4")
REFERENCE = ("actor.use_kl_loss=true", "ref.placement=host")
DISTRIBUTED = ("actor.optim.use_distributed_optimizer=true", "actor.optim.overlap_grad_reduce=true")

VARIANTS = {
    "recompute-full": ("model.recompute.granularity=full",),
    "recompute-selective": ("model.recompute.granularity=selective", "model.recompute.modules=[core_attn, mlp]"),
    "overlap-reduce": ("actor.optim.overlap_grad_reduce=true", "critic.optim.overlap_grad_reduce=true"),
    "overlap-gather": (*DISTRIBUTED, "actor.optim.overlap_param_gather=true"),
    "state-rests-on-host": ("actor.optim.state_placement=host", "critic.optim.state_placement=host"),
    "rest-on-host": ("actor.placement=host", "critic.placement=host"),
    "rest-on-host-distributed": ("actor.placement=host", "actor.optim.use_distributed_optimizer=true"),
    "context-parallel": ("parallel.context_parallel_size=2",),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train("class", 2, tmp_path_factory.mktemp("plain"), *BASE, *CRITIC, *REFERENCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_trains_the_same(plain, tmp_path, name):
    run = train("class", 2, tmp_path, *BASE, *CRITIC, *REFERENCE, *VARIANTS[name])
    for metric in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/kl_loss"):
        assert run.column(metric) == pytest.approx(plain.column(metric), rel=1e-4, abs=1e-6), metric


def test_without_a_pass_of_its_own_the_anchor_is_the_same(tmp_path):
    """One optimizer step: the old log-probs are those of the policy that is updated."""
    made = train("class", 2, tmp_path / "made", *BASE)
    skipped = train("class", 2, tmp_path / "skipped", *BASE, "actor.old_log_prob_pass=auto")
    assert max(made.column("actor/first_ratio_deviation")) < 1e-6
    for metric in ("actor/loss", "actor/grad_norm", "rollout_corr/log_prob_distance", "reward/mean"):
        assert skipped.column(metric) == pytest.approx(made.column(metric), rel=1e-5, abs=1e-6), metric
    assert "without a pass" in " ".join(skipped.output.replace("│", " ").split())
    reported = {name for name in skipped.rows[0] if name.startswith("rollout_corr/")}
    assert reported == {"rollout_corr/kl", "rollout_corr/log_prob_distance"}
