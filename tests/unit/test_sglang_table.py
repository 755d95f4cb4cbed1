"""SGLang's parameters as numbers, written down from its source (0.5.23); tests/sglang compares with its loaders."""

from dataclasses import replace

import pytest
import torch

from mppo.errors import ConfigError
from mppo.megatron.model_config import ModelConfig
from mppo.weights.architectures import ARCHITECTURES
from mppo.weights.sglang_layout import Worker, sglang_layout
from mppo.weights.transfer_plan import Holding

pytestmark = pytest.mark.unit

FAMILIES = {architecture.hf_name: architecture for architecture in ARCHITECTURES}
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=16,
    ffn_hidden_size=96,
    vocab_size=100,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
EXPERTS = replace(MODEL, qk_norm=True, num_experts=4, moe_ffn_hidden_size=24)
LAYER = "model.layers.0."


def held(family: str, model: ModelConfig, rank: int, tp: int, ep: int = 1) -> Holding:
    return sglang_layout(FAMILIES[family], model, tp, torch.bfloat16, ep=ep).holdings[Worker(0, rank)]


def rows(holding: Holding, parameter: str) -> list[tuple]:
    """`(tensor, start, stop, where it starts in the parameter)`, of stacked ones the member too."""
    return [
        (p.hf.name.removeprefix(LAYER), p.hf.start, p.hf.stop, p.own.start)
        + (() if p.own.index is None else (p.own.index,))
        for p in holding.pieces
        if p.own.name == parameter
    ]


def test_llama():
    """srt/models/llama.py: `LlamaAttention`, `LlamaMLP`, `LlamaModel`, `LlamaForCausalLM`."""
    assert held("Llama", MODEL, 1, 2).shapes == {
        "model.embed_tokens.weight": (64, 64),
        "model.norm.weight": (64,),
        LAYER + "input_layernorm.weight": (64,),
        LAYER + "post_attention_layernorm.weight": (64,),
        LAYER + "self_attn.qkv_proj.weight": (64 + 16 + 16, 64),
        LAYER + "self_attn.o_proj.weight": (64, 64),
        LAYER + "mlp.gate_up_proj.weight": (96, 64),
        LAYER + "mlp.down_proj.weight": (64, 48),
        "lm_head.weight": (64, 64),
    }


def test_the_other_families_add_biases_norms_of_heads_and_experts():
    """srt/models/{qwen2,qwen3,qwen3_moe}.py: `bias=True` of Qwen2's qkv_proj; `q_norm`, `k_norm`; `FusedMoE`."""
    llama = held("Llama", MODEL, 0, 2).shapes
    biased = held("Qwen2", replace(MODEL, qkv_bias=True), 0, 2).shapes
    normed = held("Qwen3", replace(MODEL, qk_norm=True), 0, 2).shapes
    experts = held("Qwen3Moe", EXPERTS, 0, 2).shapes
    assert biased == llama | {LAYER + "self_attn.qkv_proj.bias": (96,)}
    norms = {LAYER + f"self_attn.{x}_norm.weight": (16,) for x in "qk"}
    assert normed == llama | norms
    shared = {name: shape for name, shape in llama.items() if ".mlp." not in name}
    assert experts == shared | norms | {
        LAYER + "mlp.gate.weight": (4, 64),
        LAYER + "mlp.experts.w13_weight": (4, 24, 64),
        LAYER + "mlp.experts.w2_weight": (4, 64, 12),
    }


@pytest.mark.parametrize(
    ("rank", "tp", "expected"),
    [
        (0, 1, [("q", 0, 128, 0), ("k", 0, 32, 128), ("v", 0, 32, 160)]),
        (1, 2, [("q", 64, 128, 0), ("k", 16, 32, 64), ("v", 16, 32, 80)]),
        (1, 4, [("q", 32, 64, 0), ("k", 0, 16, 32), ("v", 0, 16, 48)]),
        (2, 4, [("q", 64, 96, 0), ("k", 16, 32, 32), ("v", 16, 32, 48)]),
        (7, 8, [("q", 112, 128, 0), ("k", 16, 32, 16), ("v", 16, 32, 32)]),
    ],
)
def test_queries_keys_and_values(rank, tp, expected):
    """srt/layers/linear.py: `QKVParallelLinear._get_shard_offset_mapping`; `num_kv_head_replicas` neighbours share a
    head: `weight_loader` takes shard `tp_rank // num_kv_head_replicas` of k and v."""
    found = rows(held("Qwen2", replace(MODEL, qkv_bias=True), rank, tp), LAYER + "self_attn.qkv_proj.weight")
    assert found == [(f"self_attn.{x}_proj.weight", *numbers) for x, *numbers in expected]
    assert [
        r[1:] for r in rows(held("Qwen2", replace(MODEL, qkv_bias=True), rank, tp), LAYER + "self_attn.qkv_proj.bias")
    ] == [tuple(numbers) for _, *numbers in expected]


@pytest.mark.parametrize(
    ("vocabulary", "tp", "size", "real"),
    [
        (100, 1, 128, [(0, 100)]),
        (100, 2, 64, [(0, 64), (64, 100)]),
        (66, 4, 32, [(0, 32), (32, 64), (64, 66), None]),
        (100, 3, 64, [(0, 64), (64, 100), None]),
        (128, 2, 64, [(0, 64), (64, 128)]),
        (65, 8, 16, [(0, 16), (16, 32), (32, 48), (48, 64), (64, 65), None, None, None]),
    ],
)
@pytest.mark.parametrize("parameter", ["model.embed_tokens.weight", "lm_head.weight"])
def test_rows_of_the_vocabulary(vocabulary, tp, size, real, parameter):
    """srt/layers/vocab_parallel_embedding.py: `VocabParallelEmbedding.__init__` pads to 64, or 64 tp where tp does not
    divide that; `weight_loader` copies the real rows to the front and fills the rest with zeros."""
    model = replace(MODEL, vocab_size=vocabulary, num_attention_heads=24, num_query_groups=24)
    for rank in range(tp):
        holding = held("Llama", model, rank, tp)
        start, stop = real[rank] or (0, 0)
        assert holding.shapes[parameter] == (size, 64)
        assert [r[1:] for r in rows(holding, parameter)] == ([(start, stop, 0)] if real[rank] else [])
        padding = [(r.start, r.stop) for r in holding.padding if r.name == parameter]
        assert padding == ([(stop - start, size)] if stop - start < size else [])


def test_feed_forward():
    """srt/layers/linear.py: `MergedColumnParallelLinear.weight_loader` puts shard 0 (gate) before shard 1 (up);
    `RowParallelLinear.weight_loader` takes columns."""
    holding = held("Llama", MODEL, 1, 4)
    assert rows(holding, LAYER + "mlp.gate_up_proj.weight") == [
        ("mlp.gate_proj.weight", 24, 48, 0),
        ("mlp.up_proj.weight", 24, 48, 24),
    ]
    (down,) = [p for p in holding.pieces if "down_proj" in p.hf.name]
    assert (down.hf.dim, down.hf.start, down.hf.stop) == (1, 24, 48)
    (output,) = [p for p in holding.pieces if "o_proj" in p.hf.name]
    assert (output.hf.dim, output.hf.start, output.hf.stop) == (1, 32, 64)


@pytest.mark.parametrize(
    ("rank", "tp", "ep", "experts", "columns"),
    [
        (1, 2, 1, [0, 1, 2, 3], (12, 24)),
        (1, 2, 2, [2, 3], (0, 24)),
        (1, 4, 2, [0, 1], (12, 24)),
        (2, 4, 2, [2, 3], (0, 12)),
    ],
)
def test_experts(rank, tp, ep, experts, columns):
    """srt/layers/moe/fused_moe_triton/layer.py: `_map_global_expert_id_to_local_expert_id`, `_load_w13` (w1 is the gate
    and comes first), `_load_w2`; srt/runtime_context.py: `moe_ep_rank`, `moe_tp_rank`."""
    holding = held("Qwen3Moe", EXPERTS, rank, tp, ep)
    start, stop = columns
    assert rows(holding, LAYER + "mlp.experts.w13_weight") == [
        (f"mlp.experts.{expert}.{which}_proj.weight", start, stop, at, member)
        for member, expert in enumerate(experts)
        for which, at in (("gate", 0), ("up", stop - start))
    ]
    assert rows(holding, LAYER + "mlp.experts.w2_weight") == [
        (f"mlp.experts.{expert}.down_proj.weight", start, stop, 0, member) for member, expert in enumerate(experts)
    ]
    assert holding.shapes[LAYER + "mlp.experts.w13_weight"] == (len(experts), 2 * (stop - start), 64)


def test_a_tied_output_layer():
    """srt/models/{llama,qwen2,qwen3}.py: `self.lm_head = self.model.embed_tokens`; qwen3_moe.py always makes one."""
    tied = replace(MODEL, tie_word_embeddings=True)
    assert "lm_head.weight" not in held("Llama", tied, 0, 2).shapes
    holding = held("Qwen3Moe", replace(EXPERTS, tie_word_embeddings=True), 0, 2)
    assert rows(holding, "lm_head.weight") == [("model.embed_tokens.weight", 0, 64, 0)]


@pytest.mark.parametrize(
    ("model", "tp", "ep", "said"),
    [
        (MODEL, 3, 1, "tp-size 3 and the 2 key/value heads"),
        (MODEL, 16, 1, "16 workers do not divide the 8 attention heads"),
        (replace(MODEL, ffn_hidden_size=99), 2, 1, "2 workers do not divide the 99 columns"),
        (EXPERTS, 2, 4, "ep-size 4 does not divide its tp-size 2"),
        (replace(EXPERTS, num_experts=3), 2, 2, "2 workers do not divide the 3 experts"),
    ],
)
def test_sizes_that_sglang_refuses(model, tp, ep, said):
    with pytest.raises(ConfigError, match=said):
        sglang_layout(FAMILIES["Qwen3Moe" if model.num_experts else "Llama"], model, tp, torch.bfloat16, ep=ep)
