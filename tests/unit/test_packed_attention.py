"""PackedAttention against scaled_dot_product_attention over padded sequences."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mppo.megatron.attention import PackedAttention, packed_seq_params

pytestmark = pytest.mark.unit

HEAD_DIM = 8
LENGTHS = {
    "one": [7],
    "equal": [5, 5, 5],
    "unequal": [3, 6, 1, 4],
    "runs": [4, 4, 2, 2, 2, 5, 4],
}


def attention(heads: int, softmax_scale: float | None = None) -> PackedAttention:
    config = TransformerConfig(num_layers=1, hidden_size=heads * HEAD_DIM, num_attention_heads=heads)
    return PackedAttention(config, softmax_scale)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], softmax_scale=None) -> Tensor:
    params = packed_seq_params(lengths)
    return attention(q.size(1), softmax_scale)(q, k, v, packed_seq_params=params)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """All sequences in one padded batch, with an explicit mask, every query head with its key head beside it."""
    sharing = q.size(1) // k.size(1)
    q, k, v = (pad(x, lengths) for x in (q, k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)))
    causal = torch.ones(q.size(2), q.size(2)).tril().bool()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal).transpose(1, 2).flatten(2)
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])


def pad(x: Tensor, lengths: list[int]) -> Tensor:
    """`[T, heads, d] -> [S, heads, longest, d]`"""
    return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)


def random_qkv(tokens: int, heads: int, groups: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, h, HEAD_DIM) for h in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=torch.double, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_padded_attention_in_value_and_gradient(lengths, groups):
    qkv = random_qkv(sum(lengths), heads=4, groups=groups)
    found, expected = packed_attention(*qkv, lengths), padded_attention(*qkv, lengths)
    torch.testing.assert_close(found, expected)

    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    gradients = torch.autograd.grad(found, qkv, upstream), torch.autograd.grad(expected, qkv, upstream)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("which", [0, -1])
def test_changing_one_sequence_moves_no_other(lengths, which):
    qkv = [x.detach() for x in random_qkv(sum(lengths), heads=4, groups=2)]
    before = packed_attention(*qkv, lengths).split(lengths)
    for x in qkv:
        x.split(lengths)[which].add_(1.0)
    after = packed_attention(*qkv, lengths).split(lengths)

    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [place == which % len(lengths) for place in range(len(lengths))]


def test_the_future_is_not_seen():
    qkv = [x.detach() for x in random_qkv(6, heads=2, groups=2)]
    before = packed_attention(*qkv, [6])
    for x in qkv:
        x[4:] += 1.0
    after = packed_attention(*qkv, [6])
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_the_softmax_scale_is_applied():
    q, k, v = random_qkv(5, heads=2, groups=2)
    found = packed_attention(q, k, v, [5], softmax_scale=0.5)
    torch.testing.assert_close(found, padded_attention(q * 0.5 * HEAD_DIM**0.5, k, v, [5]))


def test_a_batch_that_is_not_packed_is_refused():
    with pytest.raises(ValueError, match="packed_seq_params"):
        attention(heads=2)(*random_qkv(4, heads=2, groups=2))
