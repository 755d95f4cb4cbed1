"""mppo: PPO for language models inside Megatron-core's own pipeline schedules."""

__version__ = "0.1.0"
