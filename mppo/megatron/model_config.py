"""The numbers of a decoder-only transformer, free of any one library's names. Imports nothing of Megatron."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's frequency scaling. Megatron-core fixes the other three constants (1, 4 and 8192)."""

    factor: float


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    """Without padding."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    make_vocab_size_divisible_by: int = 128
    num_experts: int | None = None
    """Experts of every layer's feed-forward part; None: the model is dense."""
    moe_ffn_hidden_size: int = 0
    """Of one expert; `ffn_hidden_size` is then not read."""
    moe_topk: int = 0
    """Experts that a token goes to."""
    norm_topk_prob: bool = False
    """Whether the weights of those experts add up to one."""
    moe_aux_loss_coeff: float = 0.0
    """Of the load-balancing loss; chosen for the run, not part of the model."""

    @property
    def active_ffn_size(self) -> int:
        """Feed-forward columns that a token goes through."""
        return self.ffn_hidden_size if self.num_experts is None else self.moe_topk * self.moe_ffn_hidden_size

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding in Megatron: the vocabulary rounded up so that each of `tp` ranks has whole blocks."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple
