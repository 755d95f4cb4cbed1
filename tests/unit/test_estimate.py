"""The estimate of `mppo plan` counts what transformers counts, follows the layout, and plans whole mixes of lengths."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import MicroBatchLimit
from mppo.cli.main import main
from mppo.config import DataConfig, OptimConfig, ParallelConfig, RecomputeConfig
from mppo.errors import ConfigError, DataError
from mppo.planning.estimate import StageEstimate, estimate, mix_of
from mppo.planning.estimate.lengths import Length, Load, Sample, Spread, load_of
from mppo.planning.estimate.memory import HeadTerms, in_flight
from mppo.planning.estimate.stage_layout import Layout, stage_weights
from mppo.trainer.run_spec import UpdateSettings
from mppo.weights.architectures import architecture_of
from tests.distributed.model_folders import CONFIGS, REWARD_MODELS
from tests.unit.whole_plan import make_batch_plan

pytestmark = pytest.mark.unit

MODELS = [name for name in CONFIGS if name not in REWARD_MODELS]
LOAD = Load(tokens=1000, actions=800, micro_batches=8, all_tokens=7000, all_actions=6000)
DATA = DataConfig(max_prompt_length=100, max_response_length=400)


def model_config(name="llama"):
    hf = CONFIGS[name]
    return architecture_of(hf).model_config(hf, make_vocab_size_divisible_by=1)


def layout(dtype="float32", dp=1, optim=None, recompute=None, **parallel):
    return Layout.of(ParallelConfig(**parallel), dp, dtype, optim or OptimConfig(), recompute or RecomputeConfig())


def first_stage(where: Layout, load: Load = LOAD, name: str = "llama") -> StageEstimate:
    return estimate(model_config(name), where, load, HeadTerms()).stages[0]


def settings(mini_batch_size: int, **limit) -> UpdateSettings:
    limit = MicroBatchLimit(**limit)
    return UpdateSettings(mini_batch_size, 1, False, limit, limit, "token-mean", 1.0)


# Memory and communication of a known load


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_every_parameter(name):
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(CONFIGS[name]).parameters()
    assert stage_weights(model_config(name), layout(), 0).total == sum(p.numel() for p in parameters)


def test_stages_and_shards_together_hold_every_parameter_and_the_norms_on_each_rank():
    model, cut = model_config(), layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    parts = [stage_weights(model, cut, stage) for stage in cut.stages(model)]
    whole = stage_weights(model, layout(), 0).total
    assert sum(2 * part.total - part.whole for part in parts) == whole


def test_stages_with_uneven_numbers_of_layers_are_counted_one_by_one():
    model, cut = model_config("llama-five-layers"), layout(pipeline_model_parallel_size=4)
    assert [cut.layers(model, stage) for stage in range(4)] == [1, 1, 2, 1]
    found = [stage_weights(model, cut, stage).total for stage in range(4)]
    assert sum(found) == stage_weights(model, layout(), 0).total
    assert found[2] == 2 * found[1]
    assert cut.stages(model) == [0, 1, 2, 3]
    assert cut.stages(replace(model, num_layers=8)) == [0, 1, 3]
    shallow = replace(cut, recompute=RecomputeConfig(granularity="full", method="block", num_layers=1))
    assert [shallow.recomputed_layers(model, stage) for stage in range(4)] == [1, 1, 1, 1]


def test_experts_are_dealt_out_and_the_rest_is_not():
    model = model_config("qwen3-moe")
    whole, dealt = (stage_weights(model, layout(dp=4, expert_model_parallel_size=ep), 0) for ep in (1, 4))
    assert whole.experts == 0
    assert dealt.dense + 4 * dealt.experts == whole.dense


def test_adam_and_gradients_in_bytes():
    weights = stage_weights(model_config(), layout(), 0).total
    full, half = (first_stage(layout(dtype)).held for dtype in ("float32", "bfloat16"))
    assert (full.weights, full.gradients, full.optimizer) == (4 * weights, 4 * weights, 8 * weights)
    assert (half.weights, half.gradients, half.optimizer) == (2 * weights, 4 * weights, 12 * weights)
    spread = first_stage(layout(dp=4, optim=OptimConfig(use_distributed_optimizer=True))).held
    assert spread.optimizer == 2 * weights


def test_one_rank_sends_nothing():
    assert first_stage(layout()).sent.total == 0


@pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_parallel"),
        ({"pipeline_model_parallel_size": 2}, "pipeline"),
        ({"context_parallel_size": 2}, "context"),
        ({"dp": 2}, "data_parallel"),
        ({"dp": 2, "expert_model_parallel_size": 2}, "experts"),
    ],
)
def test_each_kind_of_parallelism_sends_its_own(parallel, kind):
    assert getattr(first_stage(layout(**parallel), name="qwen3-moe").sent, kind) > 0


def test_stages_in_the_middle_send_both_ways_and_virtual_ones_more():
    def sent(**virtual) -> list[int]:
        model = replace(model_config(), num_layers=12)
        found = estimate(model, layout(pipeline_model_parallel_size=4, **virtual), LOAD, HeadTerms())
        return [stage.sent.pipeline for stage in found.stages]

    first, middle, last = sent()
    assert middle == first + last == 2 * first
    assert sent(virtual_pipeline_model_parallel_size=3) == [5 * first, 6 * first, 5 * first]


def test_the_first_stage_has_most_in_flight_and_never_more_than_there_are():
    where = layout(pipeline_model_parallel_size=4)
    assert [in_flight(where, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(where, 0, 2) == 2
    interleaved = layout(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert [in_flight(interleaved, stage, 8) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_recomputation_keeps_less_and_more_tokens_keep_more():
    kept = first_stage(layout()).held.activations
    assert first_stage(layout(recompute=RecomputeConfig(granularity="full"))).held.activations < kept / 2
    more = replace(LOAD, tokens=2 * LOAD.tokens, actions=2 * LOAD.actions)
    assert first_stage(layout(), more).held.activations == 2 * kept


def test_whole_layers_that_are_recomputed_repeat_what_their_forward_pass_sends():
    once, twice = (
        first_stage(layout(tensor_model_parallel_size=2, sequence_parallel=True, recompute=recompute)).sent
        for recompute in (RecomputeConfig(), RecomputeConfig(granularity="full"))
    )
    a_gather = LOAD.all_tokens * model_config().hidden_size * 4 // 2
    assert twice.tensor_parallel - once.tensor_parallel == 4 * model_config().num_layers * a_gather


# Mixes of lengths


def test_a_spread_keeps_its_mean_is_cut_at_the_longest_and_is_the_same_each_time():
    spread = Spread(prompt=10, response=1000, longest=100_000, sigma=0.8)
    lengths = spread.step(2000)
    assert lengths == spread.step(2000)
    assert sum(length.response for length in lengths) / 2000 == pytest.approx(1000, rel=0.01)
    assert {length.prompt for length in lengths} == {10}
    assert max(length.response for length in replace(spread, longest=1500).step(2000)) == 1500
    assert set(replace(spread, sigma=0.0).step(5)) == {Length(10, 1000)}


def test_a_file_gives_each_of_its_lines_as_often_as_any_other(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": 3, "response": 4, "reward": 1}\n\n{"prompt": 5, "response": 6}\n')
    step = Sample.read(str(file), DATA).step(6)
    assert sorted((length.prompt, length.response) for length in step) == 3 * [(3, 4)] + 3 * [(5, 6)]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": 3, "response": 401}',
        '{"prompt": 3}',
        "3",
        "nothing",
        '{"prompt": 3, "response": 0}',
        '{"prompt": 3.5, "response": 4}',
    ],
)
def test_a_line_that_gives_no_lengths_is_named(tmp_path, line):
    file = tmp_path / "lengths.jsonl"
    file.write_text(f'{{"prompt": 3, "response": 4}}\n{line}\n')
    with pytest.raises(ConfigError, match="--lengths .*line 2: .*response"):
        Sample.read(str(file), DATA)


def test_options_that_cannot_be_are_named(tmp_path):
    with pytest.raises(ConfigError, match="--lengths .*cannot be read"):
        mix_of(DATA, str(tmp_path / "none"), None, None, None)
    with pytest.raises(ConfigError, match="--response-sigma has no effect with --lengths"):
        mix_of(DATA, "lengths.jsonl", None, None, 1.0)
    with pytest.raises(ConfigError, match="--response-sigma is -1"):
        mix_of(DATA, None, None, None, -1.0)
    with pytest.raises(ConfigError, match="--prompt-tokens is 0"):
        mix_of(DATA, None, 0, None, None)
    with pytest.raises(ConfigError, match="a response of 401 tokens, over data.max_response_length=400"):
        mix_of(DATA, None, None, 401, None)
    with pytest.raises(ConfigError, match="--response-sigma is inf"):
        mix_of(DATA, None, None, None, math.inf)
    assert mix_of(DATA, None, None, None, None) == Spread(100, 400, 400)


def test_the_load_is_that_of_the_plan():
    model, where = model_config(), layout(dp=3)
    lengths = Spread(prompt=20, response=100, longest=400, sigma=1.0).step(64)
    load = load_of(lengths, settings(32, tokens=500), model, where.sizes)
    totals = [length.total for length in lengths]
    actions = sum(length.response for length in lengths)
    plan = make_batch_plan(
        totals, mini_batch_size=32, ranks=3, limit=MicroBatchLimit(tokens=500).of_replica(),
        cost=WorkloadModel.of(model, actions / sum(totals)),
    )  # fmt: skip
    pieces = [piece for ranks in plan.micro_batches for micro_batches in ranks for piece in micro_batches]
    assert load.tokens == max(sum(totals[i] for i in piece) for piece in pieces)
    assert load.micro_batches == max(len(ranks[0]) for ranks in plan.micro_batches)
    assert load.tokens <= 500 < load.all_tokens < sum(totals) / 2
    assert 1 <= load.worst_over_mean < 1.1


def test_context_and_sequence_parallelism_cut_and_pad_micro_batches():
    parallel = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    load = load_of([Length(5, 4)] * 3, settings(3, trajectories=3), model_config(), layout(**parallel).sizes)
    assert (load.tokens, load.actions) == (18, 6)  # each of 9 tokens is padded to 12, and halved


def test_a_trajectory_over_the_budget_is_named():
    lengths = [Length(5, 4), Length(5, 6)]
    with pytest.raises(DataError, match="trajectory 1 has 11 tokens, over the micro-batch budget of 10"):
        load_of(lengths, settings(2, tokens=10), model_config(), layout().sizes)


# The command


def test_the_command_estimates_where_a_model_is_given(capsys):
    assert main(["plan", "--json", "--config-name", "class", "--world-size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["load"]["tokens"] == 64 * 16
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    assert all(stage["held"]["weights"] > 0 and stage["sent"]["pipeline"] > 0 for stage in found["stages"])
    assert main(["plan", "--json", "actor.ppo_micro_batch_size_per_gpu=1"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"] is None


def test_the_command_plans_with_a_mix_and_prints_it(capsys, tmp_path):
    options = ["plan", "--config-name", "class", "--world-size", "4"]
    assert main([*options, "--response-tokens", "4", "--response-sigma", "0.5"]) == 0
    table = capsys.readouterr().out
    for shown in ("fullest micro-batch", "over the mean", "stage 0", "activations", "tensor parallel"):
        assert shown in table
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": 2, "response": 3}\n')
    assert main([*options, "--json", "--lengths", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["load"]["tokens"] == 64 * 5
    assert main([*options, "--lengths", str(file), "--prompt-tokens", "2"]) == 2
    assert "--prompt-tokens has no effect with --lengths" in capsys.readouterr().err
