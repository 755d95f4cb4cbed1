"""Hugging Face folder -> Megatron chunks on four processes -> Hugging Face folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.distributed.model_folders import CONFIGS, EXPERT_MODELS, REWARD_MODELS, write_all, write_model
from tests.distributed.ranks import call_on_ranks
from tests.distributed.weights_worker import round_trips

pytestmark = pytest.mark.distributed

LAYOUTS = ("tp2-pp2-sp", "tp2-pp2-vpp2-sp")
EXPERT_LAYOUTS = ("tp2-pp2-ep2-sp", "pp2-vpp2-ep2-dp2", "cp2-ep4-dp2")
ROUND_TRIPS = [
    *((layout, name) for layout in LAYOUTS for name in [*CONFIGS, "llama-bfloat16"]),
    *((layout, name) for layout in EXPERT_LAYOUTS for name in EXPERT_MODELS),
]
PROCESSES = 4
LAYER, HEAD = "model.layers.3.", "score.weight"
BROKEN = {
    "broken-missing": LAYER + "mlp.up_proj.weight",
    "broken-shape": LAYER + "self_attn.o_proj.weight",
    "broken-config": ".mlp.",
    "broken-reward": HEAD,
}
"""Folders with something wrong, and (part of) the name of the tensor; the last stage holds it."""


def write_broken(folder):
    for name in BROKEN:
        write_model("reward" if name == "broken-reward" else "llama", folder / name)
    change_tensors(folder / "broken-missing", lambda tensors: tensors.pop(BROKEN["broken-missing"]))
    change_tensors(
        folder / "broken-shape", lambda tensors: tensors.update({BROKEN["broken-shape"]: torch.ones(32, 64)})
    )
    change_tensors(folder / "broken-reward", lambda tensors: tensors.update({HEAD: torch.ones(2, 64)}))
    config = folder / "broken-config" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 48}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = write_all(tmp_path_factory.mktemp("models"))
    write_model("llama", folder / "llama-bfloat16", torch.bfloat16)
    write_broken(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(models, saved):
    return call_on_ranks(round_trips, PROCESSES, models, saved)[0]


@pytest.mark.parametrize(("layout", "name"), ROUND_TRIPS)
def test_export_gives_back_every_tensor_bit_for_bit(found, layout, name):
    assert found[f"{layout}/{name}"] == [[]] * PROCESSES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "reward"])
def test_a_critic_starts_from_the_backbone_and_a_zero_head(found, layout, name):
    assert found[f"{layout}/{name}/critic"] == [[]] * PROCESSES


@pytest.mark.parametrize(("layout", "name"), ROUND_TRIPS)
def test_a_saved_folder_is_the_same_model_to_transformers(found, models, saved, layout, name):
    auto = AutoModelForSequenceClassification if name in REWARD_MODELS else AutoModelForCausalLM
    original = auto.from_pretrained(models / name)
    again, report = auto.from_pretrained(saved / layout / name, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert again.dtype == original.dtype
    assert again.state_dict().keys() == original.state_dict().keys()
    for key, tensor in original.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    tokens = torch.arange(10)[None]
    assert torch.equal(again(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_folder_has_its_tokenizer(found, models, saved, layout):
    again = AutoTokenizer.from_pretrained(saved / layout / "llama")
    original = AutoTokenizer.from_pretrained(models / "llama")
    assert again("12+3=").input_ids == original("12+3=").input_ids
    assert again.decode(again("12+3=").input_ids) == "12+3="


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BROKEN)
def test_every_rank_names_a_bad_tensor(found, layout, name):
    assert all(BROKEN[name] in message for message in found[f"{layout}/{name}"])
