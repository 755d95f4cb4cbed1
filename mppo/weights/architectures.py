"""One declarative table per architecture: Megatron parameters, Hugging Face parameters, and the cut between them.

What SGLang makes of the same tensors is in `sglang_layout.py`, in rows of the same kind. `{layer}` and `{expert}` are
numbers in the whole model. A parameter may have two Megatron names: that of the local layers, and that of Transformer
Engine's, which keep a norm inside the linear layer that follows it, and the weights of all local experts in one grouped
layer.
"""

from dataclasses import dataclass
from typing import Any

from mppo.errors import ModelError
from mppo.megatron.model_config import Llama3Rope, ModelConfig
from mppo.weights.cuts import (
    Cut,
    FeedForwardColumns,
    GateUp,
    HeadColumns,
    QueryKeyValue,
    Replicated,
    Single,
    VocabularyRows,
)

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF_LAYER + "self_attn."
_MLP, _HF_MLP = _LAYER + "mlp.", _HF_LAYER + "mlp."


@dataclass(frozen=True)
class Parameter:
    """A parameter of a Megatron chunk or of an SGLang worker, and what it is made of."""

    names: tuple[str, ...]
    """Those it may have there; the first stands for it in layouts."""
    hf: tuple[str, ...]
    """The Hugging Face tensors it is made of, in the order of the cut's sources."""
    cut: Cut
    is_vector: bool = False
    stacked: bool = False
    """Those of all local experts are members of one tensor, along a first dimension of its own."""

    def name(self, layer: int = -1, expert: int = -1) -> str:
        return self.names[0].format(layer=layer, expert=expert)

    def hf_names(self, layer: int = -1, expert: int = -1) -> list[str]:
        return [name.format(layer=layer, expert=expert) for name in self.hf]

    def hf_shapes(self, model: ModelConfig) -> list[tuple[int, ...]]:
        """Of the tensors of `hf`; what is not cut is as wide as the hidden state."""
        shapes, slices = [], self.cut.slices(model, 0, 1)
        for source in range(len(self.hf)):
            shape = [model.hidden_size] * (1 if self.is_vector else 2)
            shape[self.cut.dim] = max(s.stop for s in slices if s.source == source)
            shapes.append(tuple(shape))
        return shapes

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.hf[0]

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.hf[0]

    @property
    def on_first_stage(self) -> bool:
        return self.names[0] in ("embedding.word_embeddings.weight", "model.embed_tokens.weight")


EMBEDDING = Parameter(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), VocabularyRows())
OUTPUT = Parameter(("output_layer.weight",), ("lm_head.weight",), VocabularyRows())
TIED_OUTPUT = Parameter(OUTPUT.names, EMBEDDING.hf, VocabularyRows())
"""The copy of the embedding that Megatron keeps on the last of several pipeline stages."""
VALUE_HEAD = Parameter(OUTPUT.names, ("score.weight",), Single())

_SHARED = (
    EMBEDDING,
    Parameter(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated("hidden_size"), is_vector=True),
    Parameter(
        (_LAYER + "input_layernorm.weight", _ATTENTION + "linear_qkv.layer_norm_weight"),
        (_HF_LAYER + "input_layernorm.weight",),
        Replicated("hidden_size"),
        is_vector=True,
    ),
    Parameter(
        (_ATTENTION + "linear_qkv.weight",),
        tuple(_HF_ATTENTION + f"{x}_proj.weight" for x in "qkv"),
        QueryKeyValue(),
    ),
    Parameter((_ATTENTION + "linear_proj.weight",), (_HF_ATTENTION + "o_proj.weight",), HeadColumns()),
    Parameter(
        (_LAYER + "pre_mlp_layernorm.weight", _MLP + "linear_fc1.layer_norm_weight"),
        (_HF_LAYER + "post_attention_layernorm.weight",),
        Replicated("hidden_size"),
        is_vector=True,
    ),
)
"""What dense models and mixtures of experts have alike."""

_FEED_FORWARD = (
    Parameter((_MLP + "linear_fc1.weight",), (_HF_MLP + "gate_proj.weight", _HF_MLP + "up_proj.weight"), GateUp()),
    Parameter((_MLP + "linear_fc2.weight",), (_HF_MLP + "down_proj.weight",), FeedForwardColumns()),
)


def _of_experts(linear: str) -> tuple[str, str]:
    """The names of a linear layer's weight in sequential and in grouped experts."""
    return f"{_MLP}experts.local_experts.{{expert}}.{linear}.weight", f"{_MLP}experts.{linear}.weight{{expert}}"


_HF_EXPERT = _HF_MLP + "experts.{expert}."
_EXPERTS = (
    Parameter((_MLP + "router.weight",), (_HF_MLP + "gate.weight",), Replicated("num_experts")),
    Parameter(
        _of_experts("linear_fc1"),
        (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
        GateUp("moe_ffn_hidden_size"),
    ),
    Parameter(_of_experts("linear_fc2"), (_HF_EXPERT + "down_proj.weight",), FeedForwardColumns("moe_ffn_hidden_size")),
)
_QKV_BIAS = (
    Parameter(
        (_ATTENTION + "linear_qkv.bias",),
        tuple(_HF_ATTENTION + f"{x}_proj.bias" for x in "qkv"),
        QueryKeyValue(),
        is_vector=True,
    ),
)
_QK_NORM = tuple(
    Parameter(
        (_ATTENTION + f"{x}_layernorm.weight",),
        (_HF_ATTENTION + f"{x}_norm.weight",),
        Replicated("head_dim"),
        is_vector=True,
    )
    for x in "qk"
)


@dataclass(frozen=True)
class Architecture:
    """A family of models that share their parameters' names and shapes."""

    hf_name: str
    """The class named in config.json, without its task (`ForCausalLM`)."""
    parameters: tuple[Parameter, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False

    def rows(self, model: ModelConfig, value_head: bool = False) -> tuple[Parameter, ...]:
        """With the head that the model has: scalar, tied or its own."""
        head = VALUE_HEAD if value_head else TIED_OUTPUT if model.tie_word_embeddings else OUTPUT
        return (*self.parameters, head)

    def model_config(self, hf: Any, make_vocab_size_divisible_by: int = 128) -> ModelConfig:
        """Read a transformers configuration. Raises ModelError for a feature that mppo does not build."""
        _refuse(hf, "quantization_config", None, "quantised weights; give the folder of the unquantised model")
        _refuse(hf, "attention_bias", False, "a bias on attention projections")
        _refuse(hf, "mlp_bias", False, "a bias on feed-forward layers")
        _refuse(hf, "use_sliding_window", False, "sliding-window attention")
        _refuse(hf, "attention_dropout", 0.0, "dropout")
        _refuse(hf, "hidden_act", "silu", "another activation than silu")
        rope_theta, rope_scaling = _rope(hf)
        experts = _experts(hf) if self.experts else {}
        return ModelConfig(
            num_layers=hf.num_hidden_layers,
            hidden_size=hf.hidden_size,
            num_attention_heads=hf.num_attention_heads,
            num_query_groups=hf.num_key_value_heads or hf.num_attention_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            ffn_hidden_size=hf.intermediate_size,
            vocab_size=hf.vocab_size,
            max_position_embeddings=hf.max_position_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=hf.tie_word_embeddings,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
            **experts,
        )


ARCHITECTURES = (
    Architecture("Llama", _SHARED + _FEED_FORWARD),
    Architecture("Qwen2", _SHARED + _FEED_FORWARD + _QKV_BIAS, qkv_bias=True),
    Architecture("Qwen3", _SHARED + _FEED_FORWARD + _QK_NORM, qk_norm=True),
    Architecture("Qwen3Moe", _SHARED + _EXPERTS + _QK_NORM, qk_norm=True, experts=True),
)


def architecture_of(hf: Any) -> Architecture:
    """The table for a transformers configuration. Raises ModelError that lists what is supported."""
    names = hf.architectures or [type(hf).__name__.removesuffix("Config") + "ForCausalLM"]
    for architecture in ARCHITECTURES:
        if names[0].partition("For")[0] == architecture.hf_name:
            return architecture
    supported = ", ".join(f"{a.hf_name}ForCausalLM" for a in ARCHITECTURES)
    raise ModelError(f"architecture {names[0]} is not supported; supported: {supported}")


def _refuse(hf: Any, name: str, supported: Any, what: str) -> None:
    value = getattr(hf, name, supported)
    if value != supported:
        raise ModelError(f"the model's config.json has {name}={value!r}: mppo does not build {what}")


def _experts(hf: Any) -> dict[str, Any]:
    """The fields of ModelConfig about a mixture of experts in every layer."""
    _refuse(hf, "decoder_sparse_step", 1, "mixtures of experts in some of the layers only")
    _refuse(hf, "mlp_only_layers", [], "mixtures of experts in some of the layers only")
    if hf.num_experts_per_tok == 1 and hf.norm_topk_prob:
        raise ModelError(
            "the model's config.json has num_experts_per_tok=1 and norm_topk_prob=true: the weight of the one expert is"
            " always 1, and the router could not learn"
        )
    return {
        "num_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_topk": hf.num_experts_per_tok,
        "norm_topk_prob": hf.norm_topk_prob,
    }


def _rope(hf: Any) -> tuple[float, Llama3Rope | None]:
    """Base and scaling, from transformers 5's `rope_parameters` or the older pair of fields."""
    parameters = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    theta = float(parameters.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return theta, None
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(parameters.get(k) == v for k, v in fixed.items()):
        return theta, Llama3Rope(float(parameters["factor"]))
    raise ModelError(f"the model's config.json has rope scaling {parameters}: mppo builds `default` and llama3's own")
