"""What verl, slime and TRL call differently, or have elsewhere: old names and mppo's."""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Moved:
    """A name that other trainers have."""

    old: str
    """Its path there; `*` stands for anything."""
    new: str = ""
    """A path of mppo's configuration; empty: there is none."""
    word: str = ""
    """What is to be known besides."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.new and f"it is {self.new} here", self.word) if part)


PREFIXES = {
    "actor_rollout_ref.actor.megatron.": "parallel.",
    "actor_rollout_ref.actor.": "actor.",
    "actor_rollout_ref.rollout.": "rollout.",
    "actor_rollout_ref.ref.": "ref.",
    "actor_rollout_ref.model.": "model.",
    "actor.megatron.": "parallel.",
    "critic.megatron.": "critic.parallel.",
    "critic.model.": "critic.",
}
"""verl's groups, and where their fields are here."""

_CLIP = "actor.policy_loss.clip_ratio"
_ADV = "algorithm.adv_options."
_STEPS = "counted in training steps, each over data.train_batch_size prompts"
_TORCHRUN = "processes are torchrun's to say (--nproc-per-node, --nnodes)"
_LOADED_BY_PATH = "an import path, package.module:function"
_ENGINE = "the engine's own, which rollout.engine chooses"


def _of_trained_role(role: str) -> tuple[Moved, ...]:
    """What verl calls differently of the actor and of the critic."""
    optim = f"{role}.optim."
    return (
        Moved(f"{role}.grad_clip", optim + "clip_grad"),
        Moved(optim + "weight_decay_*", optim + "weight_decay"),
        Moved(optim + "lr_warmup_steps_ratio", optim + "lr_warmup_steps", "a number of optimizer steps"),
        Moved(optim + "total_training_steps", optim + "lr_decay_steps"),
        Moved(optim + "warmup_style", optim + "lr_decay_style"),
        Moved(f"{role}.ppo_micro_batch_size", f"{role}.ppo_micro_batch_size_per_gpu"),
        Moved(f"{role}.strategy", "parallel", "models are cut by Megatron-core"),
    )


MOVED = (
    # verl
    *_of_trained_role("actor"),
    *_of_trained_role("critic"),
    Moved("algorithm.gamma", _ADV + "gamma"),
    Moved("algorithm.lam", _ADV + "lam"),
    Moved("algorithm.norm_adv_by_std_in_grpo", _ADV + "norm_adv_by_std_in_grpo"),
    Moved("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    Moved("algorithm.target_kl", "algorithm.kl_ctrl.target_kl"),
    Moved("actor.clip_ratio", _CLIP),
    Moved("actor.clip_ratio_low", _CLIP + "_low"),
    Moved("actor.clip_ratio_high", _CLIP + "_high"),
    Moved("actor.clip_ratio_c", _CLIP + "_c"),
    Moved("actor.loss_mode", "actor.policy_loss.loss_mode"),
    Moved("actor.*fsdp_config*", "parallel", "models are cut by Megatron-core"),
    Moved("critic.forward_micro_batch_size_per_gpu", "critic.ppo_infer_micro_batch_size_per_gpu"),
    Moved("critic.forward_max_token_len_per_gpu", "critic.ppo_infer_max_token_len_per_gpu"),
    Moved("critic.*fsdp_config*", "critic.parallel", "models are cut by Megatron-core"),
    Moved("ref.log_prob_micro_batch_size_per_gpu", "actor.log_prob_micro_batch_size_per_gpu"),
    Moved("ref.log_prob_max_token_len_per_gpu", "actor.log_prob_max_token_len_per_gpu"),
    Moved("ref.fsdp_config*", "ref.placement"),
    Moved("rollout.log_prob_micro_batch_size_per_gpu", "actor.log_prob_micro_batch_size_per_gpu"),
    Moved("rollout.log_prob_max_token_len_per_gpu", "actor.log_prob_max_token_len_per_gpu"),
    Moved("rollout.name", "rollout.engine"),
    Moved("rollout.do_sample", "rollout.temperature"),
    Moved("rollout.prompt_length", "data.max_prompt_length"),
    Moved("rollout.response_length", "data.max_response_length"),
    Moved("rollout.val_kwargs.do_sample", "rollout.val_kwargs.temperature", "0 is greedy"),
    Moved("rollout.tensor_model_parallel_size", word=_ENGINE),
    Moved("rollout.gpu_memory_utilization", word=_ENGINE),
    Moved("rollout.max_num_seqs", "rollout.batch_size"),
    Moved("model.enable_gradient_checkpointing", "model.recompute.granularity", "`full` or `selective`"),
    Moved(
        "parallel.override_transformer_config.*", "model.megatron", "fields of TransformerConfig that mppo does not set"
    ),
    Moved("model.use_remove_padding", word="sequences are always packed, without padding"),
    Moved("data.train_files", "data.train.files"),
    Moved("data.val_files", "data.val.files"),
    Moved("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    Moved("data.filter_overlong_prompts", "data.overlong_prompts", "`skip`"),
    Moved("data.truncation", "data.overlong_prompts", "prompts are never cut"),
    Moved("data.reward_fn_key", "data.source_key"),
    Moved("data.seed", "trainer.seed"),
    Moved("data.gen_batch_size", "data.train_batch_size", "dynamic sampling draws as many at a time"),
    Moved("data.return_raw_chat", word="prompts that are chat messages go through the tokenizer's template"),
    Moved("custom_reward_function.path", "reward.function", _LOADED_BY_PATH),
    Moved("custom_reward_function.name", "reward.function", _LOADED_BY_PATH),
    Moved("custom_reward_function.reward_kwargs*", "reward.options"),
    Moved("reward_model.reward_manager", "reward.function"),
    Moved("reward_model.overlong_buffer.*", "reward.overlong_buffer"),
    Moved(
        "reward_model.*", "reward.function", "a reward model is called by a function of your own, which may be async"
    ),
    Moved("trainer.total_epochs", "trainer.total_training_steps", _STEPS),
    Moved("trainer.default_local_dir", "trainer.out_dir"),
    Moved("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Moved("trainer.max_critic_ckpt_to_keep", "trainer.keep_checkpoints"),
    Moved("trainer.resume_mode", "trainer.resume"),
    Moved("trainer.val_only", word="`mppo train` validates before its first step (trainer.val_before_train)"),
    Moved("trainer.n_gpus_per_node", word=_TORCHRUN),
    Moved("trainer.nnodes", word=_TORCHRUN),
    Moved("trainer.logger", word="a run writes metrics.jsonl and TensorBoard's files into trainer.out_dir"),
    Moved("trainer.project_name", "trainer.out_dir"),
    Moved("trainer.experiment_name", "trainer.out_dir"),
    # slime
    Moved("rollout_batch_size", "data.train_batch_size"),
    Moved("n_samples_per_prompt", "rollout.n"),
    Moved("global_batch_size", "actor.ppo_mini_batch_size", "in prompts, not in trajectories"),
    Moved("micro_batch_size", "actor.ppo_micro_batch_size_per_gpu"),
    Moved("max_tokens_per_gpu", "actor.ppo_max_token_len_per_gpu"),
    Moved("use_dynamic_batch_size", "actor.use_dynamic_bsz"),
    Moved("num_rollout", "trainer.total_training_steps"),
    Moved("num_epoch", "trainer.total_training_steps", _STEPS),
    Moved("hf_checkpoint", "model.path"),
    Moved("ref_load", "model.path", "the reference is the model that training starts from"),
    Moved("advantage_estimator", "algorithm.adv_estimator"),
    Moved("eps_clip", _CLIP),
    Moved("eps_clip_high", _CLIP + "_high"),
    Moved("rm_type", "reward.function"),
    Moved("custom_rm_path", "reward.function", _LOADED_BY_PATH),
    Moved("prompt_data", "data.train.files"),
    Moved("input_key", "data.prompt_key"),
    Moved("label_key", "data.answer_key"),
    Moved("tool_key", "data.tools_key"),
    Moved("eval_prompt_data", "data.val.files"),
    Moved("eval_interval", "trainer.test_freq"),
    Moved("n_samples_per_eval_prompt", "rollout.val_kwargs.n"),
    Moved("rollout_max_response_len", "data.max_response_length"),
    Moved("rollout_max_prompt_len", "data.max_prompt_length"),
    Moved("rollout_temperature", "rollout.temperature"),
    Moved("rollout_top_p", "rollout.top_p"),
    Moved("rollout_stop", "rollout.stop"),
    Moved("kl_loss_coef", "actor.kl_loss_coef"),
    Moved("kl_loss_type", "actor.kl_loss_type"),
    Moved("use_kl_loss", "actor.use_kl_loss"),
    Moved("entropy_coef", "actor.entropy_coeff"),
    Moved("lr", "actor.optim.lr"),
    Moved("weight_decay", "actor.optim.weight_decay"),
    Moved("save", "trainer.out_dir"),
    Moved("save_interval", "trainer.save_freq"),
    Moved("tensor_model_parallel_size", "parallel.tensor_model_parallel_size"),
    Moved("pipeline_model_parallel_size", "parallel.pipeline_model_parallel_size"),
    Moved("context_parallel_size", "parallel.context_parallel_size"),
    Moved("expert_model_parallel_size", "parallel.expert_model_parallel_size"),
    Moved("sequence_parallel", "parallel.sequence_parallel"),
    # TRL
    Moved("model_name_or_path", "model.path"),
    Moved("num_generations", "rollout.n"),
    Moved("learning_rate", "actor.optim.lr"),
    Moved("per_device_train_batch_size", "actor.ppo_micro_batch_size_per_gpu"),
    Moved("gradient_accumulation_steps", "actor.ppo_mini_batch_size", "in prompts; micro-batches follow from it"),
    Moved("beta", "actor.kl_loss_coef", "with actor.use_kl_loss=true"),
    Moved("epsilon", _CLIP),
    Moved("epsilon_high", _CLIP + "_high"),
    Moved("num_iterations", "actor.ppo_epochs"),
    Moved("num_ppo_epochs", "actor.ppo_epochs"),
    Moved("max_prompt_length", "data.max_prompt_length"),
    Moved("max_completion_length", "data.max_response_length"),
    Moved("reward_funcs", "reward.function"),
    Moved("scale_rewards", _ADV + "norm_adv_by_std_in_grpo"),
    Moved("loss_type", "actor.loss_agg_mode", "how token losses add up; actor.policy_loss.loss_mode names the loss"),
    Moved("mask_truncated_completions", "algorithm.overlong_masking"),
    Moved("max_grad_norm", "actor.optim.clip_grad"),
    Moved("warmup_steps", "actor.optim.lr_warmup_steps"),
    Moved("lr_scheduler_type", "actor.optim.lr_decay_style"),
    Moved("max_steps", "trainer.total_training_steps"),
    Moved("num_train_epochs", "trainer.total_training_steps", _STEPS),
    Moved("output_dir", "trainer.out_dir"),
    Moved("save_steps", "trainer.save_freq"),
    Moved("save_total_limit", "trainer.keep_checkpoints"),
    Moved("eval_steps", "trainer.test_freq"),
    Moved("temperature", "rollout.temperature"),
    Moved("top_p", "rollout.top_p"),
    Moved("top_k", "rollout.top_k"),
    Moved("use_vllm", "rollout.engine"),
    Moved("seed", "trainer.seed"),
    Moved("bf16", "model.dtype"),
    Moved("gradient_checkpointing", "model.recompute.granularity", "`full` or `selective`"),
)


def moved(path: str) -> str | None:
    """What to say of a path that another trainer has, also of one with dashes; None where it is of none."""
    path = path.replace("-", "_")
    found = next((entry for entry in MOVED if fnmatchcase(path, entry.old)), None)
    if found is not None:
        return str(found)
    for prefix, here in PREFIXES.items():
        if path.startswith(prefix):
            renamed = here + path.removeprefix(prefix)
            return moved(renamed) or f"it is {renamed} here"
    return None
