"""Rotary angles of rows against those of transformers, at positions far enough for scaled frequencies to show."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mppo.megatron.rotary import RowRotaryEmbedding
from mppo.weights.architectures import architecture_of
from tests.distributed.model_folders import COMMON, LLAMA3_ROPE

pytestmark = pytest.mark.unit

POSITIONS = torch.tensor([0, 1, 2, 0, 5000, 131071, 7])
SCALED = LlamaConfig(**COMMON | {"hidden_size": 512}, rope_scaling=LLAMA3_ROPE)
PLAIN = LlamaConfig(**COMMON | {"hidden_size": 512})


def rotary(config: LlamaConfig) -> RotaryEmbedding:
    """As Megatron makes it of the numbers that mppo reads of a folder."""
    numbers = architecture_of(config).model_config(config)
    scaling = numbers.rope_scaling
    options = {} if scaling is None else {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return RotaryEmbedding(
        numbers.head_dim, 1.0, rotary_base=numbers.rope_theta, use_cpu_initialization=True, **options
    )


@pytest.mark.parametrize("config", [PLAIN, SCALED], ids=["plain", "llama3"])
def test_each_row_is_turned_by_its_own_position(config):
    rows = RowRotaryEmbedding(rotary(config))
    rows.place(POSITIONS)
    angles = rows(10)[:, 0, 0]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])
    # an angle of 1e5 radians in float32 is right to 1e-2
    assert torch.allclose(angles.cos(), cos[0], atol=2e-2) and torch.allclose(angles.sin(), sin[0], atol=2e-2)
    near = POSITIONS < 10
    assert torch.allclose(angles.cos()[near], cos[0][near], atol=1e-6)


def test_scaled_frequencies_are_those_of_transformers():
    found, expected = rotary(SCALED).inv_freq, LlamaRotaryEmbedding(SCALED).inv_freq
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(found, rotary(PLAIN).inv_freq, rtol=0.5, atol=0), "the lowest are 32 times as low"


def test_without_positions_it_is_the_table_from_zero():
    own = rotary(PLAIN)
    assert torch.equal(RowRotaryEmbedding(own)(6), own(6))
    rows = RowRotaryEmbedding(own)
    rows.place(torch.arange(6))
    assert torch.equal(rows(6), own(6))
