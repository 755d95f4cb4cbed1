"""`mppo plan` says what a configuration does; the example is section 11.4 of the reference text."""

import json

import pytest

from mppo.cli.main import main
from mppo.weights.presets import PRESETS
from mppo.weights.sources import RandomInitialisation
from tests.distributed.model_folders import write_model

pytestmark = pytest.mark.unit

EXAMPLE = [
    "data.train_batch_size=128",
    "rollout.n=8",
    "actor.ppo_mini_batch_size=32",
    "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.ppo_epochs=2",
]


def plan(capsys, *arguments: str) -> dict:
    assert main(["plan", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_example_of_section_11_4(capsys):
    example = plan(capsys, "--world-size", "8", *EXAMPLE)
    actor = example["actor"]
    assert example["data_parallel_size"] == 8
    assert example["trajectories_per_step"] == 1024
    assert actor["trajectories_per_mini_batch"] == 256
    assert actor["trajectories_per_mini_batch_per_rank"] == 32
    assert actor["trajectories_per_wave"] == 16
    assert actor["micro_batches_per_mini_batch"] == 16
    assert actor["mini_batches_per_epoch"] == 4
    assert actor["optimizer_steps_per_training_step"] == 8


def test_the_section_14_2_configuration_has_256_trajectories_per_mini_batch(capsys):
    example = plan(
        capsys,
        "rollout.n=8",
        "data.train_batch_size=32",
        "actor.ppo_mini_batch_size=32",
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=24576",
        "actor.use_kl_loss=true",
    )
    assert example["actor"]["trajectories_per_mini_batch"] == 256
    assert example["actor"]["micro_batches_per_mini_batch"] is None
    assert example["kl_in_loss"] == "0.001 x low_var_kl"
    assert example["actor"]["loss"] == "vanilla" and example["adv_estimator"] == "grpo"


def test_the_table_names_estimator_loss_and_aggregation(capsys):
    assert main(["plan", *EXAMPLE]) == 0
    table = capsys.readouterr().out
    for shown in ("grpo", "vanilla", "token-mean", "1024", "optimizer steps"):
        assert shown in table


def test_the_critics_layout_is_shown_where_it_differs(capsys):
    assert plan(capsys, *EXAMPLE)["critic_model"] == "none"
    ppo = (*EXAMPLE, "algorithm.adv_estimator=gae", "+parallel=tp2_pp2")
    assert plan(capsys, *ppo)["critic_model"] == "the actor with a zero head, bfloat16"
    own = plan(capsys, *ppo, "critic.dtype=float32", "critic.parallel.virtual_pipeline_model_parallel_size=2")
    assert own["critic_model"] == "the actor with a zero head, float32, TP 2 x PP 2 (VPP 2) x DP 1"
    assert own["layout"] == "TP 2 x PP 2 x DP 1"


def test_the_critics_model_is_checked(capsys, tmp_path):
    folder = write_model("reward-qwen2", tmp_path)
    ppo = ("--config-name", "class", "algorithm=gae", f"critic.path={folder}", "parallel=pp2")
    assert plan(capsys, *ppo)["critic_model"] == f"{folder}, float32"
    assert main(["plan", *ppo, "critic.parallel.virtual_pipeline_model_parallel_size=5"]) == 2
    assert "more than the 8 of the critic's 8 layers" in capsys.readouterr().err


def test_a_world_that_cannot_be_cut_says_which_numbers_to_change(capsys):
    status = main(["plan", "--world-size", "6", "parallel.tensor_model_parallel_size=4", *EXAMPLE])
    message = capsys.readouterr().err
    assert status == 2
    assert "6 processes" in message and "TP 4" in message and "tensor_model_parallel_size" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size=0"], "--world-size is 0; it must be at least 1"),
        (["--prompt-tokens=5"], "--prompt-tokens has no effect without a model"),
        (["model.preset=char", "model.moe_aux_loss_coeff=0.1"], "the model is dense; unset it"),
        (["model.preset=char", "data.max_response_length=100000"], "lower one of them"),
    ],
)
def test_what_a_run_would_be_refused_with_is_refused(capsys, arguments, said):
    assert main(["plan", *EXAMPLE, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_experts_make_the_least_world_larger(capsys):
    example = plan(capsys, *EXAMPLE, "parallel.expert_model_parallel_size=2")
    assert (example["world_size"], example["data_parallel_size"]) == (2, 2)


def test_a_bad_field_ends_in_one_line(capsys):
    assert main(["plan", "actor.ppo_epoch=1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "mppo: ConfigError: unknown field 'actor.ppo_epoch'; did you mean 'actor.ppo_epochs'?"
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "rows.jsonl: no such file"),
        ("{\n", "rows.jsonl, line 1 cannot be read"),
        ('{"prompt": "1+2="}\n', "row 0 has no field 'ground_truth'"),
        ('{"prompt": "1+2=+++++++++", "ground_truth": "3"}\n', "over data.max_prompt_length=8"),
    ],
)
def test_prompts_that_a_run_would_refuse_are_refused(capsys, tmp_path, rows, said):
    file = tmp_path / "rows.jsonl"
    if rows is not None:
        file.write_text(rows)
    source = ("data.train.generator=null", f"data.train.files=[{file}]")
    assert main(["plan", "--config-name", "class", *source]) == 2
    assert said in capsys.readouterr().err


def test_all_roles_are_on_one_device(capsys):
    rest = ("actor.use_kl_loss=true", "model.make_vocab_size_divisible_by=1", "parallel=single")
    found = {}
    for placement in ("device", "host"):
        placed = [f"{role}.placement={placement}" for role in ("actor", "critic", "ref")]
        assert main(["plan", "--json", "--config-name", "offset", *rest, *placed]) == 0
        (found[placement],) = json.loads(capsys.readouterr().out)["on_device"]
    shapes = RandomInitialisation(PRESETS.get("char").fn({})[0], 1).shapes
    weights = {name: 4 * shape.numel() for name, shape in shapes.items()}
    whole, backbone = sum(weights.values()), sum(weights.values()) - weights["lm_head.weight"]
    device, host = found["device"], found["host"]
    assert (device["actor"]["weights"], device["reference"]) == (whole, whole)
    assert (device["critic"]["weights"], device["critic"]["optimizer"]) == (backbone + 4 * 64, 2 * (backbone + 4 * 64))
    assert host["actor_update"] == sum(host["actor"].values())
    assert device["actor_update"] == host["actor_update"] + 4 * (backbone + 4 * 64) + whole
    assert device["critic_update"] == host["critic_update"] + 4 * whole + whole
