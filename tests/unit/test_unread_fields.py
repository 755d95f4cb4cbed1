"""No dead knobs: of every field of the configuration it is stated that every run reads it, or when one would not."""

import pytest

from mppo.cli.compose import load_config
from mppo.config import Config
from mppo.errors import ConfigError
from mppo.trainer.run_spec import RunSpec, make_run_spec
from tests.unit.test_config import field_paths

pytestmark = pytest.mark.unit

EVERY_RUN = """
    strict
    model.path model.preset model.dtype model.make_vocab_size_divisible_by model.recompute.granularity
    model.megatron
    parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size parallel.context_parallel_size
    parallel.timeout_minutes
    data.train.files data.train.generator data.val.files data.val.generator data.prompt_key data.answer_key
    data.tools_key data.chat_template_kwargs
    data.train_batch_size data.max_prompt_length data.max_response_length data.overlong_prompts data.shuffle
    rollout.n rollout.temperature rollout.top_p rollout.top_k rollout.stop rollout.stop_token_ids rollout.ignore_eos
    rollout.dtype rollout.engine rollout.timeout_s
    reward.workers reward.timeout_s reward.on_error reward.skip_special_tokens
    algorithm.adv_estimator algorithm.kl_ctrl.type
    actor.loss_agg_mode actor.ppo_mini_batch_size actor.ppo_epochs actor.use_dynamic_bsz actor.placement
    actor.entropy_coeff actor.calculate_entropy actor.use_kl_loss
    actor.optim.lr actor.optim.lr_warmup_steps actor.optim.lr_decay_steps actor.optim.weight_decay
    actor.optim.adam_beta1 actor.optim.adam_beta2 actor.optim.adam_eps actor.optim.clip_grad
    actor.optim.use_distributed_optimizer actor.optim.overlap_grad_reduce actor.optim.overlap_param_gather
    trainer.total_training_steps trainer.seed trainer.out_dir trainer.save_freq trainer.save_hf trainer.resume
    trainer.save_hf_freq trainer.samples_per_step trainer.on_non_finite
"""
"""Read by every run: for its numbers, or to know which of the groups below it reads."""

PLUGINS = {
    "algorithm.adv_options",
    "algorithm.rollout_correction",
    "actor.policy_loss",
    "reward.sources",
}
"""Typed by what is registered: a knob that it does not read is an error (test_config, test_registry)."""

EXPERTS = {"model.moe_aux_loss_coeff", "parallel.expert_model_parallel_size"}
"""Refused once the model is known to be dense (test_model_folder, test_layout)."""

GAE, KL_LOSS, KL_REWARD = "algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
CORRECTION = "algorithm.rollout_correction"
BYPASS, FILTER = f"{CORRECTION}.bypass_mode=true", "algorithm.filter_groups.enable=true"
PARTS = ("algorithm.adv_estimator=gdpo", "algorithm.adv_options.gdpo_reward_keys=[a]", "rollout.n=2")
TOKENS = "actor.ppo_max_token_len_per_gpu"
BY_TOKENS = (
    "actor.use_dynamic_bsz=true",
    "actor.ppo_micro_batch_size_per_gpu=null",
    f"{TOKENS}=9",
)
SOURCES = "reward.sources={math: {function: exact_match}}"
SGLANG, DELTA = "rollout.engine=sglang", "rollout.sglang.transport=delta"
URLS = "rollout.sglang.urls=[http://127.0.0.1:1]"
KEYED = ("rollout.sglang.urls=[http://a:1]", "rollout.sglang.api_key_variable=KEY")
ONE_STEP = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
LAST = "num_layers_in_last_pipeline_stage=2"
TP2, PP2 = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"

REFUSED = [
    ("model.preset_options={num_hidden_layers: 3}", (), "without model.preset"),
    ("model.fp32_logits=true", ("model.dtype=float32",), "whose logits are"),
    ("model.recompute.method=block", (), "without recompute.granularity=full"),
    ("model.recompute.num_layers=2", (), "without recompute.granularity=full"),
    ("model.recompute.modules=[mlp]", (), "without recompute.granularity=selective"),
    ("parallel.sequence_parallel=true", (), "tensor_model_parallel_size=1"),
    ("parallel.virtual_pipeline_model_parallel_size=2", (), "needs pipeline_model_parallel_size"),
    ("parallel.num_layers_in_first_pipeline_stage=2", (), "needs pipeline_model_parallel_size"),
    ("parallel.num_layers_in_last_pipeline_stage=2", (), "needs pipeline_model_parallel_size"),
    ("data.train.options={size: 3}", ("data.train.files=[x.jsonl]",), "the prompts come from files"),
    ("data.val.options={size: 3}", ("data.val.files=[x.jsonl]",), "the prompts come from files"),
    ("reward.error_score=1.0", ("reward.on_error=abstain",), "has no effect with reward.on_error=abstain"),
    ("reward.max_failure_rate=0.2", (), "has no effect with reward.on_error=raise"),
    ("reward.overlong_buffer.penalty_factor=2", (), "reward.overlong_buffer.len=0"),
    ("reward.overlong_buffer.len=2", PARTS, "gdpo reads the parts of the reward"),
    ("reward.running_normalization=true", PARTS, "gdpo reads the parts of the reward"),
    ("reward.clip=2", PARTS, "gdpo reads the parts of the reward"),
    (KL_REWARD, PARTS, "gdpo reads the parts of the reward"),
    ("algorithm.kl_penalty=k2", (KL_LOSS,), "algorithm.use_kl_in_reward is off"),
    ("algorithm.kl_ctrl.kl_coef=2", (KL_LOSS,), "algorithm.use_kl_in_reward is off"),
    ("algorithm.kl_ctrl.target_kl=2", (KL_REWARD,), "algorithm.kl_ctrl.type is fixed"),
    ("algorithm.kl_ctrl.horizon=2", (KL_REWARD,), "algorithm.kl_ctrl.type is fixed"),
    ("algorithm.overlong_masking=true", ("rollout.ignore_eos=true",), "nothing would train"),
    (FILTER, (), "rollout.n=1"),
    (FILTER, ("rollout.n=2", "algorithm.filter_groups.max_num_gen_batches=1"), "draws none anew"),
    ("algorithm.filter_groups.metric=accuracy", (), "algorithm.filter_groups.enable is off"),
    ("algorithm.filter_groups.max_num_gen_batches=2", (), "algorithm.filter_groups.enable is off"),
    ("actor.loss_scale_factor=3", (), "actor.loss_agg_mode is token-mean, which does not read it"),
    ("actor.shuffle=true", (*ONE_STEP, "actor.ppo_epochs=2"), "one mini-batch has the whole batch"),
    ("actor.ppo_micro_batch_size_per_gpu=2", ("actor.use_dynamic_bsz=true",), "actor.use_dynamic_bsz=true"),
    ("actor.ppo_max_token_len_per_gpu=2", (), "actor.use_dynamic_bsz=false"),
    ("actor.log_prob_micro_batch_size_per_gpu=4", ONE_STEP, "no pass is forward-only"),
    ("actor.log_prob_micro_batch_size_per_gpu=4", (BYPASS,), "no pass is forward-only"),
    (
        "actor.log_prob_micro_batch_size_per_gpu=4",
        (GAE, *ONE_STEP, "critic.ppo_micro_batch_size_per_gpu=2"),
        "no pass is forward-only",
    ),
    ("actor.log_prob_max_token_len_per_gpu=4", (*ONE_STEP, *BY_TOKENS), "no pass is forward-only"),
    ("actor.old_log_prob_pass=always", (BYPASS,), "bypass_mode makes no such pass"),
    ("actor.kl_loss_coef=2", (KL_REWARD,), "actor.use_kl_loss is off"),
    ("actor.kl_loss_type=k2", (KL_REWARD,), "actor.use_kl_loss is off"),
    ("actor.optim.min_lr=1e-7", (), "without optim.lr_decay_steps"),
    ("actor.optim.lr_decay_style=linear", (), "without optim.lr_decay_steps"),
    ("actor.optim.state_placement=host", ("actor.placement=host",), "takes the optimizer state along"),
    ("actor.optim.grad_reduce_in_fp32=false", ("model.dtype=float32",), "in float32 anyway"),
    ("critic.cliprange_value=2", (), "algorithm.adv_estimator=grpo needs no critic"),
    ("critic.loss_scale_factor=3", (GAE,), "critic.loss_agg_mode is token-mean, which does not read it"),
    ("critic.shuffle=true", (GAE, *ONE_STEP), "one mini-batch has the whole batch"),
    ("critic.optim.state_placement=host", (GAE, "critic.placement=host"), "takes the optimizer state along"),
    ("critic.optim.grad_reduce_in_fp32=false", (GAE, "critic.dtype=float32"), "in float32 anyway"),
    ("critic.parallel.sequence_parallel=true", (GAE,), "tensor_model_parallel_size=1"),
    ("critic.parallel.sequence_parallel=false", (GAE,), "parallel.sequence_parallel is false already"),
    ("critic.parallel.sequence_parallel=false", (GAE, TP2), "parallel.sequence_parallel is false already"),
    (
        "critic.parallel.virtual_pipeline_model_parallel_size=1",
        (GAE, PP2),
        "virtual_pipeline_model_parallel_size is 1 already",
    ),
    ("critic.parallel.sequence_parallel=true", (GAE, TP2, "parallel.sequence_parallel=true"), "is true already"),
    ("critic.parallel.num_layers_in_last_pipeline_stage=2", (GAE, PP2, f"parallel.{LAST}"), "is 2 already"),
    ("critic.parallel.num_layers_in_first_pipeline_stage=2", (GAE,), "needs parallel.pipeline_model_parallel_size"),
    ("critic.parallel.num_layers_in_last_pipeline_stage=2", (GAE,), "needs parallel.pipeline_model_parallel_size"),
    ("ref.placement=device", (), "neither actor.use_kl_loss nor algorithm.use_kl_in_reward is on"),
    ("trainer.critic_warmup=2", (), "algorithm.adv_estimator=grpo needs no critic"),
    ("trainer.max_skipped_steps=3", (), "trainer.on_non_finite=stop ends the run at the first"),
    ("data.source_key=kind", (), "reward.sources names no data source"),
    ("reward.function=class", (SOURCES,), "reward.sources has a reward for each data source"),
    ("reward.options={first_line: true}", (SOURCES,), "reward.sources has a reward, with its options"),
    ("rollout.val_kwargs.n=2", ("rollout.val_kwargs.temperature=1",), "data.val is not given"),
    ("rollout.val_kwargs.temperature=1", (), "data.val is not given"),
    ("rollout.val_kwargs.top_p=0.5", (), "rollout.val_kwargs.temperature=0 is greedy"),
    ("rollout.val_kwargs.top_k=5", (), "rollout.val_kwargs.temperature=0 is greedy"),
    ("rollout.batch_size=3", (SGLANG,), "rollout.engine=sglang batches by itself"),
    *(
        (f"rollout.sglang.{field}", (), "rollout.engine=local asks no server")
        for field in (
            *("environment=x", "servers=2", "tensor_parallel_size=2", "expert_parallel_size=2", "colocated=true"),
            *("server_options=[x]", "urls=[http://127.0.0.1:1]", "transport=disk", "buffer_mb=2"),
            *("in_flight=retract", "checksum_every=2", "update_timeout_s=3", "health_timeout_s=3"),
        )
    ),
    ("rollout.sglang.environment=x", (SGLANG, URLS), "rollout.sglang.urls names servers that run"),
    ("rollout.sglang.servers=2", (SGLANG, URLS), "rollout.sglang.urls names servers that run"),
    ("rollout.sglang.start_timeout_s=3", (SGLANG, URLS), "rollout.sglang.urls names servers that run"),
    ("rollout.sglang.server_options=[x]", (SGLANG, URLS), "are of launched servers"),
    ("rollout.sglang.api_key_variable=KEY", (SGLANG,), "has no effect without rollout.sglang.urls"),
    ("rollout.sglang.buffer_mb=2", (SGLANG, "rollout.sglang.transport=disk"), "has no buffers"),
    ("rollout.sglang.delta.full_every=3", (SGLANG,), "has no effect with rollout.sglang.transport=shards"),
    ("rollout.sglang.delta.largest_share=0.5", (SGLANG,), "has no effect with rollout.sglang.transport=shards"),
    ("trainer.resume_changed=true", ("trainer.resume=false",), "has no effect with trainer.resume=false"),
    ("trainer.keep_checkpoints=2", (), "has no effect with trainer.save_freq=0"),
    ("trainer.test_freq=2", (), "data.val is not given"),
    ("trainer.val_before_train=false", (), "data.val is not given"),
]
"""An override, in which runs it would have no effect, and what the error says of it."""


def resolved(*overrides: str) -> RunSpec:
    return make_run_spec(load_config("train", ["actor.ppo_micro_batch_size_per_gpu=2", *overrides]), 1)


def path_of(override: str) -> str:
    return override.partition("=")[0]


def test_every_field_is_stated():
    """A field of the critic is covered by the rule that a run without a critic reads none of them."""
    stated = set(EVERY_RUN.split()) | PLUGINS | EXPERTS
    stated |= {path_of(override) for override, _, _ in REFUSED}
    paths = set(field_paths(Config))
    assert {path for path in paths - stated if not path.startswith("critic.")} == set()
    assert stated - paths == set()


@pytest.mark.parametrize(("override", "run", "said"), REFUSED)
def test_a_field_that_a_run_would_not_read_is_refused(override, run, said):
    with pytest.raises(ConfigError) as caught:
        resolved(*run, override)
    message = str(caught.value)
    assert said in message
    assert path_of(override).rpartition(".")[2] in message or path_of(override).partition(".")[0] in message


@pytest.mark.parametrize(
    ("override", "run"),
    [
        ("actor.log_prob_micro_batch_size_per_gpu=4", (KL_LOSS, *ONE_STEP)),
        ("actor.log_prob_micro_batch_size_per_gpu=4", (*ONE_STEP, "actor.ppo_epochs=2")),
        ("actor.log_prob_micro_batch_size_per_gpu=4", (GAE, *ONE_STEP)),
        (
            "actor.log_prob_micro_batch_size_per_gpu=4",
            (BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token"),
        ),
        ("actor.loss_scale_factor=3", ("actor.loss_agg_mode=seq-mean-token-sum-norm",)),
        ("actor.loss_scale_factor=3", (GAE, "critic.loss_agg_mode=seq-mean-token-sum-norm")),
        ("actor.shuffle=true", ("data.train_batch_size=16",)),
        ("critic.shuffle=true", (GAE, "critic.ppo_mini_batch_size=4")),
        ("critic.parallel.sequence_parallel=false", (GAE, TP2, "parallel.sequence_parallel=true")),
        ("critic.optim.grad_reduce_in_fp32=false", (GAE, "model.dtype=float32", "critic.dtype=bfloat16")),
        ("rollout.sglang.delta.full_every=3", (SGLANG, DELTA)),
        ("rollout.sglang.buffer_mb=2", (SGLANG, DELTA, *KEYED)),
    ],
)
def test_a_field_that_a_run_reads_by_a_detour_is_accepted(override, run):
    resolved(*run, override)


def test_the_budget_of_a_micro_batch_is_that_of_all_context_parallel_gpus():
    budget = ("rollout.n=2", "data.max_prompt_length=6", "data.max_response_length=10", *BY_TOKENS)
    (short,) = resolved(*budget).warnings
    assert f"{TOKENS}=9 makes a micro-batch of 9 tokens" in short
    assert resolved(*budget, "parallel.context_parallel_size=2").warnings == []
