"""Every estimator, correction and way of sampling runs end to end from a configuration, the same in every layout."""

import pytest

from mppo.algorithm.advantages import ESTIMATORS
from tests.distributed.train_runs import train, train_refused

pytestmark = pytest.mark.distributed

HERE = "tests.distributed.test_algorithms"
REWARDS = "tests.distributed.reward_functions"
BASE = (
    "trainer.total_training_steps=2",
    "data.train_batch_size=6",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=3",
    "actor.ppo_micro_batch_size_per_gpu=5",
    "data.val.generator=null",
    "data.val.options={}",
    "trainer.test_freq=0",
    "trainer.save_hf=false",
    "model.preset_options={num_hidden_layers: 2}",
    "actor.optim.lr=1e-2",
    "actor.optim.adam_eps=1e-4",
)
"""Two optimizer steps a training step, so that the second sees a policy that has moved. Adam's epsilon keeps it from
making much of gradients that are rounding alone, or a choice of tokens would turn on them."""
ONE = ("parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=1")
TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=1")
PP2 = ("parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2")


IN_PARTS = (f"reward.function={REWARDS}:reward_in_parts", "algorithm.adv_options.gdpo_reward_keys=[share, order]")
KNOBS = {
    "gae": ("critic.ppo_micro_batch_size_per_gpu=5", "trainer.critic_warmup=1"),
    "gdpo": IN_PARTS,
    "grpo_passk": ("trainer.seed=2",),  # with answers that give it a signal in both steps
}


def of_estimator(name: str) -> tuple[str, ...]:
    return (*BASE, f"algorithm.adv_estimator={name}", *KNOBS.get(name, ()))


WITH_NEEDS = {"gae": ONE, "remax": TP2, "gdpo": ONE, "optimal_token_baseline": TP2}
"""Estimators that need something of their own of the trainer, and a layout on two processes."""


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS.names()) - set(WITH_NEEDS)))
def test_every_estimator_trains(tmp_path, name):
    run = train("class", 1, tmp_path, *of_estimator(name), *ONE)
    assert min(run.column("actor/grad_norm")) > 0
    assert len(run.column("advantage/mean")) == 2


@pytest.mark.parametrize("name", WITH_NEEDS)
def test_what_estimators_need_is_the_same_in_every_layout(tmp_path, name):
    one = train("class", 1, tmp_path / "one", *of_estimator(name), *ONE)
    two = train("class", 2, tmp_path / "two", *of_estimator(name), *WITH_NEEDS[name])
    critics = ("critic/grad_norm",) if name == "gae" else ()
    for metric in ("advantage/mean", "advantage/std", "actor/grad_norm", "actor/pg_loss", *critics):
        assert two.column(metric) == pytest.approx(one.column(metric), rel=2e-4, abs=1e-6), metric
    assert min(one.column("actor/grad_norm")) > 0
    if name == "gae":
        assert len(one.column("actor/grad_norm")) == 1  # the first step warmed the critic up
        assert len(one.column("critic/grad_norm")) == 2


MODES = {
    "bypass, reinforce with normalised weights and rejection": (
        "algorithm.rollout_correction.preset=bypass_pg_geo_rs_token_tis",
        "algorithm.rollout_correction.rollout_rs_threshold='0.97_1.03'",
        "algorithm.rollout_correction.rollout_is_batch_normalize=true",
        "algorithm.rollout_correction.denominator=kept",
        "actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "decoupled, weights and rejection, epochs, clip_cov": (
        "rollout.dtype=bfloat16",  # rounds the weights after a step, so that the next rollout would differ by layout
        "trainer.total_training_steps=1",
        "algorithm.rollout_correction.preset=decoupled_seq_is_rs",
        "algorithm.rollout_correction.rollout_rs_threshold='0.998_1.002'",
        "algorithm.rollout_correction.apply_to=[policy, entropy]",
        "algorithm.rollout_correction.denominator=kept",
        "actor.entropy_coeff=0.01",
        "actor.policy_loss={loss_mode: clip_cov, clip_cov_lb: 0.01, clip_cov_ratio: 0.2}",
        "actor.ppo_epochs=2",
        "actor.shuffle=true",
        "rollout.temperature=0.8",
    ),
    "full KL in loss and reward, kl_cov, shaped rewards": (
        "actor.use_kl_loss=true",
        "actor.kl_loss_type=full",
        "actor.kl_loss_coef=0.5",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=full",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "actor.policy_loss={loss_mode: kl_cov, kl_cov_ratio: 0.2}",
        "reward.running_normalization=true",
        "reward.clip=1.5",
        "reward.overlong_buffer.len=4",
        "algorithm.overlong_masking=true",
        "rollout.stop_token_ids=[5, 6, 7, 8, 9, 10, 11, 12]",
    ),
    "gspo, dynamic sampling": (
        "actor.policy_loss.loss_mode=gspo",
        "algorithm.filter_groups.enable=true",
        f"reward.function={REWARDS}:equal_but_for_some",
    ),
}
SAME = ("actor/pg_loss", "actor/grad_norm", "actor/loss", "actor/ppo_kl")
CORRECTED = (
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/chi2_seq",
)
SAME_OF_MODE = {
    "bypass, reinforce with normalised weights and rejection": CORRECTED,
    "decoupled, weights and rejection, epochs, clip_cov": CORRECTED,
    "full KL in loss and reward, kl_cov, shaped rewards": (
        "actor/kl_loss",
        "actor/reward_kl_penalty",
        "reward/shaped/mean",
    ),
    "gspo, dynamic sampling": ("rollout/groups_left_over",),
}


@pytest.fixture(scope="module", params=MODES, ids=lambda name: name.replace(" ", "-"))
def mode(request, tmp_path_factory):
    """The overrides of a mode, and its run on one process."""
    overrides = (*BASE, *MODES[request.param])
    return request.param, overrides, train("class", 1, tmp_path_factory.mktemp("one"), *overrides, *ONE)


@pytest.mark.parametrize(
    "layout", [TP2, PP2, (*ONE, "actor.ppo_micro_batch_size_per_gpu=2")], ids=["tp2", "pp2", "dp2"]
)
def test_what_looks_at_the_whole_mini_batch_is_the_same_in_every_layout(mode, tmp_path, layout):
    name, overrides, one = mode
    two = train("class", 2, tmp_path, *overrides, *layout)
    for metric in (*SAME, *SAME_OF_MODE[name]):
        assert two.column(metric) == pytest.approx(one.column(metric), rel=2e-4, abs=1e-6), metric


def test_each_mode_does_what_it_is_for(mode):
    name, _, run = mode
    if "rejection" in name:
        assert 0 < max(run.column("rollout_corr/rollout_rs_masked_fraction")) < 1
    if "normalised" in name:
        assert run.column("rollout_corr/rollout_is_batch_norm_factor")[-1] != 1.0
        assert "actor/pg_clipfrac" not in run.rows[0]
    if "clip_cov" in name:
        assert min(run.column("actor/pg_clipfrac")) > 0
    if "full KL" in name:
        assert run.column("actor/reward_kl_penalty")[0] == pytest.approx(0, abs=1e-12)
        assert run.column("actor/reward_kl_penalty")[1] > 1e-6
        assert run.column("actor/kl_loss")[0] > 0
        assert max(run.column("reward/shaped/max")) <= 1.5
        assert run.column("batch/kept_share")[0] < 1.0
    if "dynamic" in name:
        assert max(run.column("rollout/generation_batches")) > 1
        silent, used = run.column("rollout/groups_without_signal"), run.column("rollout/groups_without_signal_used")
        assert all(without > filling for without, filling in zip(silent, used, strict=True))


def mean_loss(x):
    from mppo.algorithm.policy_losses import TokenLosses

    return TokenLosses((-x.advantages * x.log_probs).mean())


def loss_that_breaks(x):
    """Finite on the numbers of the probe, whose log-probs are above -4; not on a fresh model's."""
    import torch

    from mppo.algorithm.policy_losses import TokenLosses

    loss = -x.advantages * x.log_ratio.exp()
    unlikely = x.old_log_probs < -4.0
    first = x.segments.ids == 0
    return TokenLosses(torch.where(first & unlikely, torch.inf, loss))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("actor.policy_loss.loss_mode=" + HERE + ":mean_loss",), "mean_loss' returned loss of shape [] (a mean?"),
        (("actor.policy_loss.loss_mode=" + HERE + ":loss_that_breaks",), "in trajectories 0"),
        (("algorithm.adv_estimator=gdpo", *IN_PARTS[1:]), "reported no part 'share'"),
        (
            ("algorithm.adv_estimator=gdpo", *IN_PARTS, "algorithm.use_kl_in_reward=true"),
            "reads the parts of the reward",
        ),
        (("actor.policy_loss.loss_mode=vanilla", "algorithm.rollout_correction.bypass_mode=true"), "contradicts"),
        (("algorithm.rollout_correction.denominator=kept",), "takes anything out"),
    ],
    ids=["mean", "not-finite", "no-parts", "parts-only", "bypass-and-loss", "idle-denominator"],
)
def test_what_cannot_be_is_refused_with_its_name(tmp_path, overrides, said):
    output = train_refused("class", 1, tmp_path, *BASE, *ONE, *overrides)
    assert said in " ".join(output.split())
