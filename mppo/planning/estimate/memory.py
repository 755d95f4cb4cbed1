"""What one rank holds while it updates a model.

Weights, gradients and optimizer state are counted exactly, but for the padding of the buffers of a distributed
optimizer (less than 128 parameters a rank and buffer, where all widths are multiples of 64). Activations are those that
autograd keeps of mppo's local layers on a CPU, with an attention that keeps no scores; the masks of context parallelism
are left out, and numbers per token. A GPU keeps less of the norms, Transformer Engine of the rotation and the copies of
the attention's output too. The head is one on a GPU, whose tiles are larger. Left out are the gradients of single
weights other than the output projection's, and what allocators lose. Of what only Transformer Engine recomputes, norms
are counted as gone but were never measured, and the activations of experts (`moe_act`) are counted as kept.
"""

from dataclasses import dataclass

from mppo.megatron.head import GPU_BLOCK, PolicyHead
from mppo.megatron.model_config import ModelConfig
from mppo.planning.estimate.lengths import Load
from mppo.planning.estimate.stage_layout import FP32, Layout, stage_weights

KL_BYTES = 33
"""Per word and token, while the terms of an exact KL are worked out: eight numbers and a choice."""


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of all micro-batches that are in flight at once, and what is recomputed beside them."""
    head: int
    """Of the output projection at its highest moment: tiles, numbers per token, gradients."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class HeadTerms:
    """What the loss wants of the head."""

    entropy: bool = False
    """That has a gradient."""
    full_kl: bool = False

    @property
    def policies(self) -> int:
        """Whose probabilities are worked out."""
        return 1 + self.full_kl


def held_by(model: ModelConfig, layout: Layout, load: Load, stage: int, terms: HeadTerms) -> Memory:
    """By one rank of a pipeline stage."""
    weights = stage_weights(model, layout, stage)
    moments = 2 * FP32 + (FP32 if layout.bytes_per_weight < FP32 else 0)  # and fp32 master weights in bf16
    spread = layout.optim.use_distributed_optimizer
    parts = ((weights.dense, layout.shards), (weights.experts, layout.expert_shards))
    head = 0
    if stage == layout.sizes.pp - 1 and layout.value_head:
        head = load.actions * model.hidden_size * FP32
    elif stage == layout.sizes.pp - 1:
        columns = model.padded_vocab_size(layout.sizes.tp) // layout.sizes.tp
        head = head_bytes(model.hidden_size, columns, load.actions, layout.bytes_per_weight, terms)
    return Memory(
        weights=weights.total * layout.bytes_per_weight,
        gradients=weights.total * layout.bytes_per_gradient,
        optimizer=sum(count * moments // (ranks if spread else 1) for count, ranks in parts),
        activations=activation_bytes(model, layout, load, stage),
        head=head,
    )


def activation_bytes(model: ModelConfig, layout: Layout, load: Load, stage: int) -> int:
    """Kept at the highest moment: by the micro-batches in flight, and by the head or what is recomputed first."""
    layer, layers, again = Layer(model, layout), layout.layers(model, stage), layout.recomputed_layers(model, stage)
    group = layout.recompute.num_layers if layout.recompute.method == "uniform" else 1
    kept = (layers - again) * layer.kept + -(-again // group) * layer.entry
    if again:  # which starts from the rotary angles of the rows, one piece for each chunk of layers
        kept += (layout.sizes.vpp or 1) * model.head_dim * FP32
    beside = load.tokens * (group * layer.kept - layer.entry if again else layer.recomputed)
    if stage == layout.sizes.pp - 1:
        head_input = load.actions * model.hidden_size * layout.bytes_per_weight
        beside = max(beside, load.tokens * layer.norm + head_input)
    return int(load.tokens * in_flight(layout, stage, load.micro_batches) * kept + beside)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose backward pass is still to come at the highest moment; parts of one are single chunks."""
    pp, chunks = layout.sizes.pp, layout.sizes.vpp or 1
    ahead = pp - stage if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    return min(ahead, micro_batches * chunks) / chunks


@dataclass(frozen=True)
class Layer:
    """Bytes per token of one layer."""

    model: ModelConfig
    layout: Layout

    @property
    def kept(self) -> float:
        return self.norms + self.attention + self.feed_forward

    @property
    def entry(self) -> float:
        """The hidden states that go in."""
        return self.model.hidden_size * self.layout.bytes_per_weight / self.layout.cut

    @property
    def norm(self) -> float:
        """What comes in, and the same normalised, both in float32."""
        return 2 * FP32 * self.model.hidden_size / self.layout.cut

    @property
    def norms(self) -> float:
        """Two, with their outputs, which are the inputs of projections; a router keeps its own copy in float32."""
        if self.layout.recomputes("layernorm"):
            return 2 * self.entry
        outputs = 2 * self.entry if self.model.num_experts is None else self.entry + self.norm / 2
        return 2 * self.norm + outputs

    @property
    def attention(self) -> float:
        """Queries, keys, values, their rotation, and the output, once as such and once joined."""
        sizes, model, size = self.layout.sizes, self.model, self.layout.bytes_per_weight
        queries = model.num_attention_heads * model.head_dim / sizes.tp
        keys = model.num_query_groups * model.head_dim / sizes.tp
        projected = queries + 2 * keys  # of which values are a part
        attended = queries + 2 * keys * sizes.cp if self._gathers else queries + keys + projected
        output = queries * (1 if self.layout.recomputes("core_attn") else 2)
        total = size * (attended + output + 4 * model.head_dim)
        return total + self._query_key_norms(queries, keys)

    def _query_key_norms(self, queries: float, keys: float) -> float:
        """As other norms; but what comes in is a part of the projection's output, which is kept anyway, where that is
        in float32 already: keys, and a single group's queries."""
        if not self.model.qk_norm:
            return 0
        parts = keys + queries * (self.model.num_query_groups == self.layout.sizes.tp)
        is_kept = self.layout.bytes_per_weight == FP32 and not self._gathers
        return FP32 * (2 * (queries + keys) - parts * is_kept)

    @property
    def _gathers(self) -> bool:
        """Whether keys and values of all context-parallel ranks are kept."""
        return self.layout.sizes.cp > 1 and not self.layout.recomputes("core_attn")

    @property
    def feed_forward(self) -> float:
        return 0 if self._skips_feed_forward else self._whole_feed_forward

    @property
    def recomputed(self) -> float:
        """What a part that is run again keeps beside all that was kept."""
        return self._whole_feed_forward if self._skips_feed_forward else 0

    @property
    def _skips_feed_forward(self) -> bool:
        return self.layout.recomputes("mlp" if self.model.num_experts is None else "moe")

    @property
    def _whole_feed_forward(self) -> float:
        """Gate and up together, silu of the gate, a copy of up, their product; experts their input and, weighted by
        probabilities, the product again."""
        sizes, model, size = self.layout.sizes, self.model, self.layout.bytes_per_weight
        if model.num_experts is None:
            return 5 * model.ffn_hidden_size / sizes.tp * size
        routed = model.moe_topk * sizes.etp / self.layout.cut
        return routed * (model.hidden_size + 6 * model.moe_ffn_hidden_size / sizes.etp) * size


def head_bytes(
    hidden_size: int, columns: int, actions: int, size: int, terms: HeadTerms, block: int = GPU_BLOCK
) -> int:
    """At its highest moment, of `columns` words of one rank and `actions` tokens in weights of `size` bytes.

    Each pass makes a tile while what was made of the one before is still there. Forward, besides four numbers per token
    and block of words, and five more while they are put together; an exact KL then makes many of two tiles. Backward,
    besides the gradients of the hidden states in float32 and of the weight, and in 16 bits that of a block in float32.
    """
    chunk, block = min(PolicyHead.chunk, actions), min(block, columns)
    numbers, tile = -(-columns // block) * actions * FP32, chunk * block
    narrow = size if size < FP32 else 0  # tiles are made in 16 bits before they are in float32
    made, logits = tile * (FP32 + narrow), tile * FP32 * (1 + terms.entropy)
    forward = max(9 * numbers, 4 * numbers + logits + made, KL_BYTES * tile * terms.full_kl)
    slopes = 2 * tile * FP32 + made if terms.full_kl else max(made, logits)
    products = max(chunk, block) * hidden_size * narrow
    gradients = actions * hidden_size * FP32 + columns * hidden_size * size + bool(narrow) * block * hidden_size * FP32
    return max(forward, gradients + tile * size + max(slopes, products))
