"""What one rank sends in one optimizer step.

Bytes are those that leave the rank when collectives run as rings: a gather of N bytes (and a scattered sum of N) sends
`N (n-1) / n` on each of n ranks, an all-reduce twice as much, an all-to-all what is not the rank's own. Left out are
numbers and metrics of the step (a few hundred bytes), and what the control plane says before it.

Context parallelism is taken to gather keys and values, as mppo's own attention does. Experts are taken to be equally
popular.
"""

from dataclasses import dataclass

from mppo.megatron.model_config import ModelConfig
from mppo.planning.estimate.lengths import Load
from mppo.planning.estimate.stage_layout import FP32, Layout, embedding_weights, stage_weights

INT64 = 8
SHAPE = 3 * INT64
"""Bytes that announce the shape of each message between pipeline stages."""


@dataclass(frozen=True)
class Sent:
    """Bytes."""

    tensor_parallel: int
    pipeline: int
    context: int
    data_parallel: int
    experts: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def sent_by(model: ModelConfig, layout: Layout, load: Load, stage: int, policies: int) -> Sent:
    """By one rank of a pipeline stage; `policies` have their probabilities worked out in the loss."""
    return Sent(
        tensor_parallel=_tensor_parallel(model, layout, load, stage, policies),
        pipeline=_pipeline(model, layout, load, stage),
        context=_context(model, layout, load, stage),
        data_parallel=_data_parallel(model, layout, stage),
        experts=_experts(model, layout, load, stage),
    )


def gathered(payload: int, ranks: int) -> int:
    """Bytes that one rank sends for gathers that give every rank `payload` bytes, or for scattered sums of as many."""
    return payload * (ranks - 1) // ranks


def all_reduced(payload: int, ranks: int) -> int:
    """Bytes that one rank sends for all-reduces of `payload` bytes."""
    return 2 * gathered(payload, ranks)


def _hidden(model: ModelConfig, layout: Layout, load: Load) -> int:
    """Bytes of the hidden states of all micro-batches."""
    return load.all_tokens * model.hidden_size * layout.bytes_per_weight


def _tensor_parallel(model: ModelConfig, layout: Layout, load: Load, stage: int, policies: int) -> int:
    """A block (attention; feed-forward) gathers its input and sums its output up, which without sequence parallelism is
    one all-reduce, and in the backward pass the other way round. Sequence parallelism gathers the input again there,
    for the gradient of the weights.
    """
    sizes = layout.sizes
    forward, backward = 2, 3 if sizes.sequence_parallel else 2
    layers, again = layout.layers(model, stage), layout.recomputed_layers(model, stage)
    gathers = layers * (forward + backward) + again * forward
    if model.num_experts is None:
        gathers += layers * (forward + backward) + (layers if layout.recomputes("mlp") else again) * forward
    gathers += 2 * (stage == 0)  # the embedding
    numbers = 0
    if stage == sizes.pp - 1:
        gathers += 2  # the hidden states before the head
        numbers = 5 * policies + (policies > 1)  # maxima and four sums of each policy, and the KL of two
    weights = stage_weights(model, layout, stage)
    shared = weights.whole if sizes.sequence_parallel else weights.query_key_norms
    return (
        gathered(gathers * _hidden(model, layout, load), sizes.tp)
        + all_reduced(numbers * load.all_actions * FP32, sizes.tp)
        + all_reduced(shared * layout.bytes_per_gradient, sizes.tp)
    )


def _pipeline(model: ModelConfig, layout: Layout, load: Load, stage: int) -> int:
    """Hidden states forward from all model chunks but the last, their gradients back from all but the first."""
    sizes = layout.sizes
    if sizes.pp == 1:
        return 0
    is_first, is_last = stage == 0, stage == sizes.pp - 1
    chunks = 2 * (sizes.vpp or 1) - is_first - is_last
    sent = chunks * (_hidden(model, layout, load) // layout.cut + load.micro_batches * SHAPE)
    if model.tie_word_embeddings and (is_first or is_last):
        sent += all_reduced(embedding_weights(model, sizes.tp) * layout.bytes_per_gradient, 2)
    return sent


def _context(model: ModelConfig, layout: Layout, load: Load, stage: int) -> int:
    """Keys and values are gathered, their gradients summed up and scattered."""
    sizes, layers = layout.sizes, layout.layers(model, stage)
    passes = 2 * layers + (layers if layout.recomputes("core_attn") else layout.recomputed_layers(model, stage))
    of_ranks = load.all_tokens * sizes.cp * 2 * model.num_query_groups * model.head_dim // sizes.tp
    return gathered(passes * of_ranks * layout.bytes_per_weight, sizes.cp)


def _data_parallel(model: ModelConfig, layout: Layout, stage: int) -> int:
    """Gradients are all-reduced; a distributed optimizer scatters their sums and gathers the parameters.

    Megatron-core has an optimizer for experts that are dealt out and one for the rest, and gathers all parameters after
    the step of each, unless the gathers overlap with the next forward pass.
    """
    weights, optim = stage_weights(model, layout, stage), layout.optim
    gathers = 2 if weights.experts and not optim.overlap_param_gather else 1
    sent = 0
    for count, ranks in ((weights.dense, layout.shards), (weights.experts, layout.expert_shards)):
        gradients = count * layout.bytes_per_gradient
        if optim.use_distributed_optimizer:
            sent += gathered(gradients, ranks) + gathers * gathered(count * layout.bytes_per_weight, ranks)
        else:
            sent += all_reduced(gradients, ranks)
    return sent


def _experts(model: ModelConfig, layout: Layout, load: Load, stage: int) -> int:
    """Tokens go to the ranks of their experts and come back; experts that TP cuts get the tokens of all its ranks.

    Each with its probability (one way), after an exchange of how many there are.
    """
    sizes = layout.sizes
    if model.num_experts is None:
        return 0
    layers = layout.layers(model, stage)
    again = layers if layout.recomputes("moe") else layout.recomputed_layers(model, stage)
    forward, passes = layers + again, 2 * layers + again
    routed = model.moe_topk * load.all_tokens // layout.cut
    moved = passes * routed * (2 * model.hidden_size * layout.bytes_per_weight + FP32)
    counts = forward * load.micro_batches * model.num_experts * INT64
    return (
        gathered(moved, sizes.ep)
        + gathered(moved * sizes.etp, sizes.etp)
        + gathered(counts * sizes.ep * sizes.etp, sizes.ep * sizes.etp)
    )
