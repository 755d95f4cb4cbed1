"""Memory and communication of one rank, on paper: what a layout asks of a model and a mix of lengths.

Weights, gradients and optimizer state are counted exactly. Activations are those that autograd keeps for a transformer
layer as Megatron-core runs it (Korthikanti et al., 2205.05198, with a flash attention and a gated feed-forward).
"""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from mppo.config import OptimConfig, ParallelConfig, RecomputeConfig
from mppo.megatron.model_config import ModelConfig
from mppo.trainer.plan import Plan, UpdatePlan
from mppo.trainer.resolve import Resolved, UpdateSettings

FP32 = 4


@dataclass(frozen=True)
class Load:
    """What one rank works on in one optimizer step."""

    tokens: int
    """Of a micro-batch on this rank, after context parallelism has cut it."""
    actions: int
    """Those of them that are projected."""
    micro_batches: int


@dataclass(frozen=True)
class Layout:
    """The numbers of ranks, and what the dtype and the optimizer make of them."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    sequence_parallel: bool
    bytes_per_weight: int
    optim: OptimConfig
    recompute: RecomputeConfig
    chunk: int = 1024
    """Tokens whose logits exist at one time."""

    @classmethod
    def of(
        cls, parallel: ParallelConfig, dp: int, dtype: str, optim: OptimConfig, recompute: RecomputeConfig
    ) -> "Layout":
        return cls(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            dp=dp,
            sequence_parallel=parallel.sequence_parallel,
            bytes_per_weight=2 if dtype == "bfloat16" else FP32,
            optim=optim,
            recompute=recompute,
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank of the fullest pipeline stage: held, and sent in one optimizer step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of all micro-batches that are in flight at once."""
    logits: int
    """Of the chunk that exists at one time, forward and backward."""
    sent_tensor_parallel: int
    sent_pipeline: int
    sent_context: int
    sent_data_parallel: int

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def load_of(plan: UpdatePlan, settings: UpdateSettings, prompt: int, response: int, ranks: int, cp: int) -> Load:
    """What one rank works on, when every trajectory has `prompt` and `response` tokens; `ranks` are data-parallel."""
    length = prompt + response
    if settings.limit.tokens:
        tokens = settings.limit.tokens
        trajectories = -(-plan.trajectories_per_mini_batch // ranks)
        micro_batches = -(-trajectories // max(tokens * cp // length, 1))
    else:
        tokens = -(-settings.limit.trajectories * length // cp)
        micro_batches = plan.micro_batches_per_mini_batch
    return Load(tokens, tokens * response // length, micro_batches)


def layer_weights(model: ModelConfig, tp: int, ep: int = 1) -> int:
    """Parameters of one layer on one rank; experts are cut as TP says where EP does not deal them out whole."""
    h, d = model.hidden_size, model.head_dim
    qkv = (model.num_attention_heads + 2 * model.num_query_groups) * d // tp
    attention = qkv * (h + model.qkv_bias) + model.num_attention_heads * d // tp * h + 2 * d * model.qk_norm
    feed_forward = 3 * model.ffn_hidden_size // tp * h
    if model.num_experts is not None:
        expert = 3 * model.moe_ffn_hidden_size // (tp if ep == 1 else 1) * h
        feed_forward = model.num_experts // ep * expert + model.num_experts * h
    return attention + feed_forward + 2 * h


def stage_weights(model: ModelConfig, tp: int, pp: int, stage: int, ep: int = 1, value_head: bool = False) -> int:
    """Parameters of one rank of a pipeline stage."""
    embedding = model.padded_vocab_size(tp) // tp * model.hidden_size
    total = model.num_layers // pp * layer_weights(model, tp, ep)
    if stage == 0:
        total += embedding
    if stage == pp - 1:
        has_own_output = not model.tie_word_embeddings or pp > 1
        output = model.hidden_size if value_head else embedding * has_own_output
        total += model.hidden_size + output
    return total


def layer_activations(model: ModelConfig, layout: Layout, tokens: int) -> int:
    """Bytes that autograd keeps of one layer for a micro-batch of `tokens`."""
    h, d, tp, size = model.hidden_size, model.head_dim, layout.tp, layout.bytes_per_weight
    cut = tp if layout.sequence_parallel else 1
    if layout.recompute.granularity == "full":
        return tokens * h * size // (cut * layout.recompute.num_layers)
    outside = 2 * 2 * h / cut  # two norms: what goes in and what comes out; out is the input of a projection too
    attention = (2 * model.num_attention_heads + 2 * model.num_query_groups) * d / tp  # q, k, v and the output
    rotated = (model.num_attention_heads + model.num_query_groups) * d / tp
    width = model.ffn_hidden_size if model.num_experts is None else model.moe_topk * model.moe_ffn_hidden_size
    feed_forward = 4 * width / tp  # gate, up, silu of the gate, their product
    if layout.recompute.granularity == "selective" and "mlp" in layout.recompute.modules:
        feed_forward = 0
    return int(tokens * size * (outside + attention + rotated + feed_forward))


def estimate(model: ModelConfig, layout: Layout, load: Load) -> Estimate:
    """Of the fullest stage: the first, which has most micro-batches in flight, or the last, which has the head."""
    return max((_of_stage(model, layout, load, stage) for stage in {0, layout.pp - 1}), key=lambda e: e.memory)


def _of_stage(model: ModelConfig, layout: Layout, load: Load, stage: int) -> Estimate:
    tp, pp, size, h = layout.tp, layout.pp, layout.bytes_per_weight, model.hidden_size
    weights = stage_weights(model, tp, pp, stage, layout.ep)
    shards = layout.dp * layout.cp
    moments = 2 * FP32 + (FP32 if size < FP32 else 0)  # and fp32 master weights where training is in bf16
    layers = model.num_layers // pp
    in_flight = min(pp - stage, load.micro_batches)
    logits = 0
    if stage == pp - 1:
        columns = model.padded_vocab_size(tp) // tp
        logits = 3 * min(layout.chunk, load.actions) * columns * FP32
    gradient = FP32 if layout.optim.grad_reduce_in_fp32 else size
    return Estimate(
        weights=weights * size,
        gradients=weights * gradient,
        optimizer=weights * moments // (shards if layout.optim.use_distributed_optimizer else 1),
        activations=in_flight * layers * layer_activations(model, layout, load.tokens),
        logits=logits,
        sent_tensor_parallel=_ring(tp, 4 * layers * load.micro_batches * load.tokens * h * size),
        sent_pipeline=2 * load.micro_batches * load.tokens * h * size if pp > 1 else 0,
        sent_context=_gathered(layout.cp, 4 * layers * load.micro_batches * load.tokens * model.num_query_groups
                               * model.head_dim // tp * size),
        sent_data_parallel=_ring(shards, weights * gradient),
    )  # fmt: skip


def _ring(ranks: int, payload: int) -> int:
    """Bytes that one rank sends for all-reduces of `payload` bytes, as a ring does them."""
    return 2 * payload * (ranks - 1) // ranks


def _gathered(ranks: int, payload: int) -> int:
    """Bytes that one rank sends for gathers (or scattered sums) of its `payload`."""
    return payload * (ranks - 1)


def estimate_actor(resolved: Resolved, plan: Plan, model: ModelConfig, prompt: int, response: int) -> Estimate:
    """Of the actor's update, with trajectories of these mean lengths (tokens)."""
    config = resolved.config
    layout = Layout.of(
        config.parallel, resolved.data_parallel_size, config.model.dtype, config.actor.optim, config.model.recompute
    )
    load = load_of(plan.actor, resolved.actor, prompt, response, layout.dp, layout.cp)
    return estimate(model, layout, load)


def print_estimate(found: Estimate, console: Console) -> None:
    """Memory and traffic as a table."""
    table = Table(title="the actor on one rank of the fullest pipeline stage, an optimizer step, on paper")
    table.add_column("what it holds or sends")
    table.add_column("GiB", justify="right")
    for name, count in {**vars(found), "memory altogether": found.memory}.items():
        table.add_row(name.replace("_", " "), f"{count / 2**30:.4g}")
    console.print(table)
