"""The jobs of 64 processes: a dense model and a mixture of experts, first, middle and last stage of four."""

from dataclasses import dataclass, replace

from mppo.config import ParallelConfig
from mppo.megatron.model_config import ModelConfig

WORLD, PP = 64, 4
LENGTHS, PROMPT, MICRO_BATCHES = (2048, 2048, 2048, 2048), 512, 4
"""Tokens of the trajectories of a micro-batch and of their prompts; micro-batches of a replica."""

DENSE = ModelConfig(
    num_layers=40,
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=8,
    head_dim=128,
    ffn_hidden_size=28672,
    vocab_size=128256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
)
EXPERTS = replace(DENSE, num_experts=16, moe_ffn_hidden_size=3584, moe_topk=2, norm_topk_prob=True, num_layers=8)
"""As wide, with fewer layers: experts run one by one, and each is a call of its own here."""
PARALLEL = ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=PP, sequence_parallel=True)


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    parallel: ParallelConfig
    stage: int

    @property
    def rank(self) -> int:
        """The first of the stage."""
        return self.stage * WORLD // PP


_MODELS = {"dense": (DENSE, PARALLEL), "experts": (EXPERTS, replace(PARALLEL, expert_model_parallel_size=8))}
_STAGES = {"first": 0, "middle": 1, "last": PP - 1}
CASES = {f"{kind} {name}": Case(*_MODELS[kind], stage) for kind in _MODELS for name, stage in _STAGES.items()}
