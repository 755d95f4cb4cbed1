"""Training end to end through torchrun: it learns, every layout sees the same, and nothing is lost on the way."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.distributed.launch import torchrun
from tests.distributed.train_runs import train, train_killed, train_refused, train_under_torchrun

pytestmark = pytest.mark.distributed


def layout(tp: int, pp: int, *more: str) -> tuple[str, ...]:
    return (f"parallel.tensor_model_parallel_size={tp}", f"parallel.pipeline_model_parallel_size={pp}", *more)


SHORT = ("trainer.total_training_steps=3", "data.train_batch_size=8", "rollout.n=4", "actor.ppo_mini_batch_size=8")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return train_under_torchrun("class", 4, tmp_path_factory.mktemp("class"))


def test_the_class_task_is_learned_from_random_initialisation_with_tp2_pp2(learned):
    assert learned.column("reward/mean")[0] < 0.5
    assert learned.column("reward/mean")[-1] > 0.9
    assert learned.output.rstrip().splitlines()[-1].startswith("held-out greedy accuracy: ")


def test_the_ratio_is_one_at_the_first_update(learned):
    assert max(learned.column("actor/first_ratio_deviation")) < 1e-6


def test_the_engine_and_the_trainer_agree_on_log_probs(learned):
    assert max(learned.column("rollout_corr/log_prob_distance")) < 1e-5


def test_a_run_leaves_a_log_metrics_samples_tensorboard_and_a_curve(learned):
    steps = learned.rows[-1]["step"]
    logged = (learned.out_dir / "train.log").read_text().splitlines()
    assert sum(line.startswith("step ") for line in logged) == steps
    samples = sorted((learned.out_dir / "samples").glob("step_*.jsonl"))
    assert len(samples) == steps
    assert {"prompt", "response", "reward"} <= json.loads(samples[0].read_text().splitlines()[0]).keys()
    assert list((learned.out_dir / "tensorboard").glob("events.*"))
    assert (learned.out_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return train("class", 1, tmp_path_factory.mktemp("one"), *layout(1, 1), *MINI_BATCHES)


MINI_BATCHES = (
    *SHORT,
    "model.preset_options={num_hidden_layers: 4}",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_epochs=2",
    "actor.shuffle=true",
    "actor.loss_agg_mode=seq-mean-token-mean",
    "actor.use_kl_loss=true",
    "actor.entropy_coeff=0.01",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (2, layout(1, 1, "actor.ppo_micro_batch_size_per_gpu=3")),
        (2, layout(1, 2, "model.make_vocab_size_divisible_by=1", "ref.placement=device")),
        (2, layout(2, 1, "parallel.sequence_parallel=true", "actor.ppo_micro_batch_size_per_gpu=5")),
        (2, layout(1, 1, "actor.optim.use_distributed_optimizer=true")),
        (2, layout(1, 2, "parallel.virtual_pipeline_model_parallel_size=2", "actor.ppo_micro_batch_size_per_gpu=5")),
    ],
    ids=["dp2", "pp2", "tp2-sp", "dp2-distributed-optimizer", "pp2-vpp2"],
)
def test_several_mini_batches_and_epochs_give_the_same_metrics_in_every_layout(
    one_process, tmp_path, processes, overrides
):
    """Three steps of 2 epochs x 2 shuffled mini-batches with both KL paths: sampling is seeded per request."""
    run = train("class", processes, tmp_path, *MINI_BATCHES, *overrides)
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/reward_kl_penalty", "reward/mean"):
        assert run.column(name) == pytest.approx(one_process.column(name), rel=1e-4, abs=1e-6), name


def test_a_critic_with_mini_batches_of_its_own_trains_the_same_on_two_data_parallel_ranks(tmp_path):
    """Trajectories move before each epoch: for the critic first, then for the actor, with hidden states."""
    overrides = (
        *MINI_BATCHES,
        "trainer.total_training_steps=2",
        "actor.kl_loss_type=full",
        "algorithm.adv_estimator=gae",
        "critic.ppo_mini_batch_size=2",
        "critic.ppo_epochs=2",
        "critic.shuffle=true",
        *layout(1, 1),
    )
    one = train("class", 1, tmp_path / "one", *overrides)
    two = train("class", 2, tmp_path / "two", *overrides)
    for name in ("critic/vf_loss", "critic/grad_norm", "actor/loss", "actor/grad_norm", "actor/kl_loss"):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-4, abs=1e-6), name


EXPERTS = (
    *MINI_BATCHES,
    "trainer.total_training_steps=2",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_epochs=1",
    "data.val.generator=null",
    "data.val.options={}",
    "model.preset=char-moe",
    "model.preset_options={}",
    "model.moe_aux_loss_coeff=0.01",
    "actor.ppo_micro_batch_size_per_gpu=1",  # so that the load-balancing loss is of the same tokens in every layout
)
EP2 = "parallel.expert_model_parallel_size=2"


@pytest.fixture(scope="module")
def experts_on_one_process(tmp_path_factory):
    return train("class", 1, tmp_path_factory.mktemp("experts"), *layout(1, 1), *EXPERTS)


@pytest.mark.parametrize(
    "overrides",
    [
        layout(1, 1, EP2, "actor.optim.use_distributed_optimizer=true"),
        layout(2, 1, EP2, "parallel.sequence_parallel=true"),
    ],
    ids=["ep2-dp2-distributed-optimizer", "tp2-ep2-sp"],
)
def test_a_mixture_of_experts_trains_alike_wherever_its_experts_are(experts_on_one_process, tmp_path, overrides):
    run = train("class", 2, tmp_path, *EXPERTS, *overrides)
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/balance_loss", "reward/mean"):
        assert run.column(name) == pytest.approx(experts_on_one_process.column(name), rel=1e-4, abs=1e-6), name
    assert max(run.column("rollout_corr/log_prob_distance")) < 1e-5


def test_a_mixture_of_experts_resumes_in_another_layout(experts_on_one_process, tmp_path):
    overrides = (*EXPERTS, "trainer.save_freq=1", "actor.optim.use_distributed_optimizer=true")
    train("class", 2, tmp_path, *layout(1, 1, EP2), *overrides, "trainer.total_training_steps=1")
    resumed = train("class", 2, tmp_path, *layout(2, 1, EP2, "parallel.sequence_parallel=true"), *overrides)
    for name in ("actor/loss", "actor/grad_norm"):
        assert resumed.column(name) == pytest.approx(experts_on_one_process.column(name), rel=1e-4), name


def test_a_resumed_run_goes_on_exactly_as_one_that_was_not_stopped(tmp_path):
    overrides = (*SHORT, *layout(1, 2), "trainer.save_freq=2", "trainer.total_training_steps=4")
    whole = train("class", 2, tmp_path / "whole", *overrides)
    train("class", 2, tmp_path / "parts", *overrides, "trainer.total_training_steps=2")
    parts = train("class", 2, tmp_path / "parts", *overrides)
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert parts.column(name) == pytest.approx(whole.column(name), rel=1e-6)
    assert parts.rows[-1]["step"] == 4


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path):
    overrides = (*SHORT, *layout(1, 1), "trainer.save_freq=2", "trainer.total_training_steps=6")
    whole = train("class", 2, tmp_path / "whole", *overrides)
    train_killed("class", 2, tmp_path / "killed", *overrides)
    resumed = train("class", 2, tmp_path / "killed", *overrides)
    assert resumed.rows[-1]["step"] == 6
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert resumed.column(name) == pytest.approx(whole.column(name), rel=1e-6), name


def test_a_critic_under_the_distributed_optimizer_resumes_in_another_layout(tmp_path):
    overrides = (
        "data.train_batch_size=16",
        "actor.ppo_mini_batch_size=16",
        "actor.optim.use_distributed_optimizer=true",
        "critic.optim.use_distributed_optimizer=true",
        "trainer.save_hf=false",
        "data.val.generator=null",
        "data.val.options={}",
        "trainer.test_freq=0",
        "trainer.save_freq=2",
        "trainer.total_training_steps=4",
    )
    whole = train("offset", 2, tmp_path / "whole", *layout(1, 1), *overrides)
    train("offset", 2, tmp_path / "parts", *layout(1, 1), *overrides, "trainer.total_training_steps=2")
    parts = train("offset", 2, tmp_path / "parts", *layout(2, 1), *overrides)
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
        assert parts.column(name) == pytest.approx(whole.column(name), rel=1e-4)


def test_bf16_with_fp32_master_weights_trains(tmp_path):
    run = train("class", 2, tmp_path, *SHORT, *layout(2, 1), "model.dtype=bfloat16")
    assert len(run.column("actor/grad_norm")) == 3
    assert max(run.column("rollout_corr/log_prob_distance")) < 0.05


def test_a_rank_with_nothing_to_train_joins_every_collective(tmp_path):
    """One trajectory, two data-parallel ranks."""
    run = train(
        "class", 2, tmp_path, *SHORT, *layout(1, 1), "data.train_batch_size=1", "rollout.n=1",
        "actor.ppo_mini_batch_size=1", "data.val.generator=null", "data.val.options={}",
    )  # fmt: skip
    assert run.column("batch/trajectories") == [1.0, 1.0, 1.0]


def test_a_token_budget_is_hard_and_names_what_breaks_it(tmp_path):
    overrides = (*SHORT, *layout(1, 2), "actor.use_dynamic_bsz=true", "actor.ppo_micro_batch_size_per_gpu=null")
    run = train("class", 2, tmp_path / "fits", *overrides, "actor.ppo_max_token_len_per_gpu=25")
    assert len(run.column("actor/loss")) == 3
    output = train_refused("class", 2, tmp_path / "not", *overrides, "actor.ppo_max_token_len_per_gpu=9")
    assert "prompt 0, sample 0 has 10 tokens, over the micro-batch budget of 9" in output


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (layout(4, 1), "2 processes cannot be cut into TP 4 x PP 1"),
        (layout(1, 2, "model.preset_options={num_hidden_layers: 1}"), "more than the 1 of the model's 1 layers"),
        (layout(2, 1, "model.preset_options={num_attention_heads: 1}"), "divide the model's 1 attention heads"),
        (layout(1, 1, "model.preset=null", "model.path=nowhere"), "model.path=nowhere: no such folder"),
        (layout(1, 1, "reward.function=tests.distributed.reward_functions:not_a_number"), "returned nan"),
    ],
)  # fmt: skip
def test_bad_input_ends_every_rank_with_an_error_that_names_it(tmp_path, overrides, said):
    assert said in train_refused("class", 2, tmp_path, *SHORT, *overrides)


def test_what_a_rank_refuses_ends_torchrun_too(tmp_path):
    finished = torchrun(2, "-m", "mppo", "train", "--config-name=class", *layout(4, 1), f"trainer.out_dir={tmp_path}")
    assert finished.returncode != 0
    assert "2 processes cannot be cut into TP 4 x PP 1" in finished.stdout


def test_what_was_trained_is_saved_when_a_step_is_refused(tmp_path):
    overrides = (*SHORT, *layout(1, 1), "reward.function=tests.distributed.reward_functions:good_at_first")
    overrides += ("trainer.val_before_train=false",)
    assert "raised RuntimeError" in train_refused("class", 2, tmp_path, *overrides)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000001"
    lines = [json.loads(line) for line in (tmp_path / "samples" / "pending.jsonl").read_text().splitlines()]
    assert len(lines) >= 8 and len(lines) % 4 == 0, "all answers of a group at least of each rank"


def test_what_was_trained_is_saved_and_exported_when_a_validation_is_refused(tmp_path):
    overrides = (*SHORT, *layout(1, 1), "reward.function=tests.distributed.reward_functions:good_in_training")
    overrides += ("trainer.val_before_train=false",)
    assert "raised RuntimeError" in train_refused("class", 2, tmp_path, *overrides)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000003"
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_the_trained_model_is_left_as_a_hugging_face_folder(learned):
    config = AutoConfig.from_pretrained(learned.out_dir / "hf")
    model = AutoModelForCausalLM.from_pretrained(learned.out_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(learned.out_dir / "hf")
    assert (config.hidden_size, config.dtype, model.dtype) == (64, torch.float32, torch.float32)
    for asked, belongs in (("d:", str.isdigit), ("l:", str.isalpha)):
        prompt = torch.tensor([tokenizer(asked)["input_ids"]])
        answer = tokenizer.decode(model.generate(prompt, max_new_tokens=8, do_sample=False)[0, 2:])
        assert sum(map(belongs, answer)) >= 7


def test_a_resumed_run_takes_the_learning_rate_it_is_given_when_told_to_go_on_changed(tmp_path):
    overrides = (*SHORT, *layout(1, 1), "trainer.save_freq=1", "actor.optim.lr_warmup_steps=4")
    train("class", 1, tmp_path, *overrides, "trainer.total_training_steps=2")
    changed = (*overrides, "actor.optim.lr=1e-4", "trainer.total_training_steps=5")
    assert "actor.optim.lr: 0.002 -> 0.0001" in train_refused("class", 1, tmp_path, *changed)
    resumed = train("class", 1, tmp_path, *changed, "trainer.resume_changed=true")
    assert "step_000002: 2 steps, weight version 2" in resumed.output
    assert resumed.column("actor/lr") == pytest.approx([0.5e-3, 1e-3, 0.75e-4, 1e-4, 1e-4])
