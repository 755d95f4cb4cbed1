"""Whether models suit a configuration, by their numbers alone."""

import torch

from mppo.config import ParallelConfig, RecomputeConfig
from mppo.errors import ConfigError
from mppo.megatron.model import transformer_config
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.stage_layers import layers_of_stages
from mppo.megatron.topology import check_layout
from mppo.trainer.run_spec import RunSpec


def check_models(spec: RunSpec, model: ModelConfig, critic: ModelConfig | None) -> None:
    """Raise ConfigError, naming the number to change, for a layout, lengths or recomputation that a model has no place
    for."""
    config, recompute = spec.config, spec.config.model.recompute
    check_layout(config.parallel, model, None if critic is None else (spec.critic_parallel, critic))
    if config.model.megatron:
        transformer_config(model, config.parallel, getattr(torch, config.model.dtype), recompute, config.model.megatron)
    _check_recompute(recompute, "model.recompute", model, config.parallel)
    if critic is not None and spec.critic_parallel is not None:
        own = config.critic.recompute
        _check_recompute(
            own or recompute, "critic.recompute" if own else "model.recompute", critic, spec.critic_parallel
        )
    if beyond := [token for token in config.rollout.stop_token_ids if token >= model.vocab_size]:
        raise ConfigError(f"rollout.stop_token_ids names {beyond[0]}, but the model has {model.vocab_size} tokens")
    longest = config.data.max_prompt_length + config.data.max_response_length
    for role, numbers in (("model", model), ("critic", critic)):
        if numbers is not None and longest > numbers.max_position_embeddings:
            raise ConfigError(
                f"data.max_prompt_length + data.max_response_length = {longest}, but the {role} has positions for"
                f" {numbers.max_position_embeddings}; lower one of them"
            )


def _check_recompute(recompute: RecomputeConfig, field: str, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Megatron-core cuts each model chunk into groups of num_layers, with nothing left over."""
    absent = "mlp" if model.num_experts else "moe"
    if recompute.granularity == "selective" and absent in recompute.modules:
        raise ConfigError(f"{field}.modules names {absent}, which the model does not have; leave it out")
    if recompute.granularity == "full" and recompute.method == "uniform":
        for stage in layers_of_stages(model, parallel):
            for chunk in stage:
                if len(chunk) % recompute.num_layers:
                    raise ConfigError(
                        f"{field}.num_layers={recompute.num_layers} does not divide the {len(chunk)} layers of a"
                        " model chunk, as method=uniform asks for; change it, or use method=block"
                    )
