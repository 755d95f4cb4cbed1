"""Whether models suit a configuration, by their numbers alone."""

from mppo.errors import ConfigError
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import check_layout
from mppo.trainer.run_spec import RunSpec


def check_models(spec: RunSpec, model: ModelConfig, critic: ModelConfig | None) -> None:
    """Raise ConfigError, naming the number to change, for a layout or lengths that a model has no place for."""
    config = spec.config
    check_layout(config.parallel, model, None if critic is None else (spec.critic_parallel, critic))
    longest = config.data.max_prompt_length + config.data.max_response_length
    for role, numbers in (("model", model), ("critic", critic)):
        if numbers is not None and longest > numbers.max_position_embeddings:
            raise ConfigError(
                f"data.max_prompt_length + data.max_response_length = {longest}, but the {role} has positions for"
                f" {numbers.max_position_embeddings}; lower one of them"
            )
