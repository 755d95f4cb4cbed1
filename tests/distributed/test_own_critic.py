"""The critic may be another model than the actor, cut in its own way within the same process groups."""

import pytest

from tests.distributed.assemble_worker import assembled
from tests.distributed.model_folders import write_model
from tests.distributed.ranks import call_on_ranks
from tests.distributed.train_runs import train

pytestmark = pytest.mark.distributed

BASE = (
    "model.preset_options={num_hidden_layers: 4}",
    "trainer.total_training_steps=3",
    "trainer.save_hf=false",
    "trainer.test_freq=0",
    "data.train_batch_size=8",
    "data.max_response_length=7",  # trajectories of an odd length, which sequence parallelism pads
    "data.val.generator=null",
    "data.val.options={}",
    "rollout.n=2",
    "algorithm.adv_estimator=gae",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=3",
    "critic.optim.lr=1e-3",
)
METRICS = ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/explained_variance")
OWN_STAGES = "critic.parallel.virtual_pipeline_model_parallel_size"


def layout(tp: int, pp: int, *more: str) -> tuple[str, ...]:
    return (f"parallel.tensor_model_parallel_size={tp}", f"parallel.pipeline_model_parallel_size={pp}", *more)


def assert_same(run, expected, metrics=METRICS):
    for name in metrics:
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def other_family(tmp_path_factory):
    """A Llama of 4 layers as the actor, a Qwen2 of 8 narrower ones and more tokens as the critic."""
    folder = write_model("reward-qwen2", tmp_path_factory.mktemp("models") / "reward-qwen2")
    return (*BASE, f"critic.path={folder}")


@pytest.fixture(scope="module")
def one_process(other_family, tmp_path_factory):
    return train("class", 1, tmp_path_factory.mktemp("one"), *layout(1, 1), *other_family)


def test_what_is_its_own_reaches_the_critic_and_not_the_actor(other_family, tmp_path):
    own = (f"{OWN_STAGES}=4", "critic.recompute={granularity: full}", "critic.dtype=bfloat16")
    resting = "critic.optim.state_placement=host"
    overrides = (*layout(1, 2), *other_family, *own, resting)
    found = call_on_ranks(assembled, 2, tmp_path, "class", overrides)[0]
    actor, critic = found["actor"], found["critic"]
    cut = ("chunks", "layers", "recompute", "multiple", "dtype")
    assert [actor[name] for name in cut] == [1, 4, None, 1, "torch.float32"]
    assert [critic[name] for name in cut] == [4, 8, "full", 2, "torch.bfloat16"]

    assert not any(actor["offloaded"].values()), "nothing of the actor rests in host memory"
    assert critic["offloaded"]["state"] > 0 and critic["offloaded"]["weights"] == critic["offloaded"]["gradients"] == 0
    assert not any(critic["onloaded"].values()), "during an update everything is on the device"


def test_the_critic_alone_is_interleaved_and_recomputed(other_family, one_process, tmp_path):
    own = (f"{OWN_STAGES}=4", "critic.recompute={granularity: full}")
    assert_same(train("class", 2, tmp_path, *layout(1, 2), *other_family, *own), one_process)


def test_the_actor_alone_is_interleaved_and_both_resume_where_the_critic_alone_cuts_sequences(
    other_family, one_process, tmp_path
):
    overrides = (*other_family, "trainer.save_freq=1", "critic.optim.use_distributed_optimizer=true")
    interleaved = layout(1, 2, "parallel.virtual_pipeline_model_parallel_size=2", f"{OWN_STAGES}=1")
    train("class", 2, tmp_path, *interleaved, *overrides, "trainer.total_training_steps=2")
    own = layout(2, 1, "critic.parallel.sequence_parallel=true")
    resumed = train("class", 2, tmp_path, *own, *overrides)
    assert len(resumed.rows) == 3
    assert_same(resumed, one_process)


def test_a_critic_in_bf16_beside_an_actor_in_float32(other_family, one_process, tmp_path):
    run = train(
        "class", 1, tmp_path, *layout(1, 1), *other_family, "critic.dtype=bfloat16", "trainer.total_training_steps=1"
    )
    found, expected = (of.column("critic/vf_loss")[0] for of in (run, one_process))
    assert found != expected
    assert found == pytest.approx(expected, rel=0.05)
    assert max(run.column("rollout_corr/log_prob_distance")) < 1e-5


ONE_BY_ONE = (  # so that the load-balancing loss is of the same tokens in every layout
    "actor.ppo_micro_batch_size_per_gpu=1",
    "trainer.total_training_steps=2",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
)


def test_a_critic_with_experts_beside_a_dense_actor(tmp_path):
    folder = write_model("reward-qwen3-moe", tmp_path / "reward")
    overrides = (*BASE, *ONE_BY_ONE, f"critic.path={folder}", "critic.moe_aux_loss_coeff=0.01")
    alone = train("class", 1, tmp_path / "one", *layout(1, 1), *overrides)
    own = layout(2, 1, "parallel.expert_model_parallel_size=2", "critic.parallel.sequence_parallel=true")
    run = train("class", 2, tmp_path / "two", *own, *overrides)
    assert_same(run, alone, (*METRICS, "critic/balance_loss"))
    assert "actor/balance_loss" not in run.rows[0]
