"""What an estimate is of: how a model is cut, in which dtype, with which optimizer, and its parameters by rank."""

from dataclasses import dataclass

from mppo.config import OptimConfig, ParallelConfig, RecomputeConfig
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.stage_layers import layers_of_stages
from mppo.megatron.topology import Sizes

FP32 = 4


@dataclass(frozen=True)
class Layout:
    """The numbers of ranks, and what the dtype, the optimizer and recomputation make of them."""

    parallel: ParallelConfig
    sizes: Sizes
    bytes_per_weight: int
    optim: OptimConfig
    recompute: RecomputeConfig
    value_head: bool = False
    """A critic: a scalar in place of the output layer."""

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        dp: int,
        dtype: str,
        optim: OptimConfig,
        recompute: RecomputeConfig,
        *,
        value_head: bool = False,
    ) -> "Layout":
        size = 2 if dtype == "bfloat16" else FP32
        return cls(parallel, Sizes.of(parallel, dp), size, optim, recompute, value_head)

    @property
    def bytes_per_gradient(self) -> int:
        return FP32 if self.optim.grad_reduce_in_fp32 else self.bytes_per_weight

    @property
    def shards(self) -> int:
        """Ranks that hold a part of the tokens, and the same weights but for experts."""
        return self.sizes.dp * self.sizes.cp

    @property
    def expert_shards(self) -> int:
        """Ranks that hold the same experts."""
        return self.shards * self.sizes.tp // (self.sizes.ep * self.sizes.etp)

    @property
    def cut(self) -> int:
        """Ranks over which activations between tensor-parallel regions are cut."""
        return self.sizes.tp if self.sizes.sequence_parallel else 1

    def stages(self, model: ModelConfig) -> list[int]:
        """The pipeline stages that differ: the first, those in the middle with the most micro-batches in flight of each
        number of layers, the last."""
        last = self.sizes.pp - 1
        middle = {self.layers(model, stage): stage for stage in reversed(range(1, last))}
        return sorted({0, *middle.values(), last})

    def layers(self, model: ModelConfig, stage: int) -> int:
        """Of a pipeline stage."""
        return sum(map(len, layers_of_stages(model, self.parallel)[stage]))

    def recomputed_layers(self, model: ModelConfig, stage: int) -> int:
        """Layers of a stage that are run again, whole, in the backward pass."""
        if self.recompute.granularity != "full":
            return 0
        if self.recompute.method == "uniform":
            return self.layers(model, stage)
        return sum(min(self.recompute.num_layers, len(c)) for c in layers_of_stages(model, self.parallel)[stage])

    def recomputes(self, module: str) -> bool:
        """Whether a part of each layer is run again."""
        return self.recompute.granularity == "selective" and module in self.recompute.modules


@dataclass(frozen=True)
class Weights:
    """Parameters of one rank of a pipeline stage."""

    dense: int
    experts: int
    """Those of experts that are dealt out, which other ranks share than the rest; 0 where none are."""
    whole: int
    """Those of `dense` that tensor parallelism does not cut: norms and routers."""
    query_key_norms: int
    """Those of `whole` that see the heads of one rank only."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


def stage_weights(model: ModelConfig, layout: Layout, stage: int) -> Weights:
    """Parameters of one rank of a pipeline stage; experts are cut as TP says where EP does not deal them out."""
    tp, layers = layout.sizes.tp, layout.layers(model, stage)
    h, d = model.hidden_size, model.head_dim
    query_key_norms = layers * 2 * d * model.qk_norm
    whole = layers * 2 * h + query_key_norms
    cut = layers * _attention_weights(model, tp)
    experts = 0
    if model.num_experts is None:
        cut += layers * 3 * model.ffn_hidden_size // tp * h
    else:
        whole += layers * model.num_experts * h
        experts = layers * model.num_experts // layout.sizes.ep * 3 * model.moe_ffn_hidden_size // layout.sizes.etp * h
    if stage == 0:
        cut += embedding_weights(model, tp)
    if stage == layout.sizes.pp - 1:
        whole += h * (1 + layout.value_head)
        shares = model.tie_word_embeddings and layout.sizes.pp == 1
        cut += 0 if shares or layout.value_head else embedding_weights(model, tp)
    if layout.sizes.ep == 1:
        cut, experts = cut + experts, 0
    return Weights(whole + cut, experts, whole, query_key_norms)


def embedding_weights(model: ModelConfig, tp: int) -> int:
    """Of one rank's rows of the embedding, or of the output projection."""
    return model.padded_vocab_size(tp) // tp * model.hidden_size


def _attention_weights(model: ModelConfig, tp: int) -> int:
    h, d = model.hidden_size, model.head_dim
    qkv = (model.num_attention_heads + 2 * model.num_query_groups) * d // tp
    return qkv * (h + model.qkv_bias) + model.num_attention_heads * d // tp * h
