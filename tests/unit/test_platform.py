"""What the CPU stand-ins must leave as it was for other libraries in the process."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import mppo.megatron  # noqa: F401  (installs the stand-ins)
from tests.distributed.model_folders import write_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["empty", "zeros", "ones", "arange", "randn"])
def test_a_device_context_still_reaches_the_factories(name):
    with torch.device("meta"):
        assert getattr(torch, name)(2).is_meta


def test_transformers_still_loads_a_folder(tmp_path):
    """It makes the model on the meta device and then fills in what is not in the folder, the rotary frequencies."""
    model = AutoModelForCausalLM.from_pretrained(write_model("llama", tmp_path))
    frequencies = model.model.rotary_emb.inv_freq
    exponents = torch.arange(0, 16, 2) / 16
    torch.testing.assert_close(frequencies, 10000.0**-exponents)
