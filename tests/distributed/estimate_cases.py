"""The cases of test_estimate_measured.py, read by pytest and by every rank."""

from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from mppo.batch.batch_plan import MicroBatchLimit
from mppo.config import OptimConfig, ParallelConfig, RecomputeConfig
from mppo.megatron.model_config import ModelConfig
from mppo.planning.estimate.memory import HeadTerms
from mppo.trainer.run_spec import UpdateSettings
from mppo.weights.architectures import architecture_of
from tests.invariance.matrix import parallel_config, processes_of

TRAJECTORIES, PROMPT, RESPONSE = 8, 32, 96
LIMIT = MicroBatchLimit(trajectories=2)
SETTINGS = UpdateSettings(TRAJECTORIES, 1, False, LIMIT, LIMIT, "token-mean", 1.0)

SIZES = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Multiples of 128, so that the buffers of a distributed optimizer need no padding."""

CONFIGS = {
    "llama": LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]),
    "llama-tied": LlamaConfig(**SIZES | {"tie_word_embeddings": True}, architectures=["LlamaForCausalLM"]),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=64, norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    layout: str = "dp1"
    model: str = "llama"
    dtype: str = "float32"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    distributed: bool = False
    """The optimizer's state is spread over data-parallel ranks."""

    @property
    def name(self) -> str:
        how = {None: [], "full": ["full"], "selective": self.recompute.modules}[self.recompute.granularity]
        return "-".join([self.layout, self.model, self.dtype, *how] + ["distributed"] * self.distributed)

    @property
    def processes(self) -> int:
        return 1 if self.layout == "dp1" else processes_of(self.layout)

    @property
    def data_parallel_size(self) -> int:
        return self.processes // self.parallel.model_parallel_size

    @property
    def parallel(self) -> ParallelConfig:
        return parallel_config(self.layout)

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(use_distributed_optimizer=self.distributed)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def model_config(self) -> ModelConfig:
        hf = CONFIGS[self.model]
        return architecture_of(hf).model_config(hf)


FULL = RecomputeConfig(granularity="full")


def selective(*modules: str) -> RecomputeConfig:
    return RecomputeConfig(granularity="selective", modules=list(modules))


CASES = sorted(
    [
        Case(),
        Case(dtype="bfloat16"),
        Case(recompute=FULL),
        Case(recompute=selective("core_attn", "mlp")),
        Case(model="qwen3-moe"),
        Case(model="qwen3-moe", dtype="bfloat16"),
        Case(model="qwen3-moe", recompute=selective("moe")),
        Case("tp2"),
        Case("tp2", recompute=selective("mlp")),
        Case("tp2-sp"),
        Case("tp2-sp", recompute=FULL),
        Case("tp2-sp", "qwen3-moe"),
        Case("pp2"),
        Case("pp2", "llama-tied"),
        Case("pp2", recompute=FULL),
        Case("pp2-vpp2"),
        Case("cp2"),
        Case("cp2", recompute=selective("core_attn")),
        Case("dp2"),
        Case("dp2", distributed=True),
        Case("dp2", dtype="bfloat16", distributed=True),
        Case("ep2-dp2", "qwen3-moe"),
        Case("ep2-dp2", "qwen3-moe", distributed=True),
        Case("tp2-sp-ep2", "qwen3-moe", recompute=FULL),
        Case("pp4"),
        Case("tp2-sp-pp2"),
    ],
    key=lambda case: (case.processes, case.layout),
)


@dataclass(frozen=True)
class HeadCase:
    """An output head alone, on one process."""

    tokens: int
    vocabulary: int
    width: int
    dtype: str
    terms: HeadTerms

    @property
    def name(self) -> str:
        terms = [name for name, wanted in vars(self.terms).items() if wanted] or ["log_probs"]
        return "-".join(map(str, [self.tokens, self.vocabulary, self.width, self.dtype, *terms]))


HEADS = [
    HeadCase(*shape, dtype, terms)
    for shape in ((256, 8192, 256), (2048, 4096, 128))
    for dtype in ("float32", "bfloat16")
    for terms in (HeadTerms(), HeadTerms(entropy=True), HeadTerms(full_kl=True))
]
"""Many words and few tokens, and the other way round."""
