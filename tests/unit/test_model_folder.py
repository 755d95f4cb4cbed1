"""Opening and loading a Hugging Face folder: what is wrong with it is said by name."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from mppo.cli.compose import load_config
from mppo.config import CriticConfig, ModelSource
from mppo.errors import ConfigError, ModelError
from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.engines.local import local_engine
from mppo.weights.fused import on_disk
from mppo.weights.load import load
from mppo.weights.pretrained import open_critic, open_model
from mppo.weights.sources import RandomInitialisation, SafetensorsFolder
from tests.distributed.model_folders import COMMON, write_model

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path):
    return write_model("llama", tmp_path / "llama")


def opened(folder):
    return open_model(ModelSource(path=str(folder), dtype="float32"), seed=1)


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_the_numbers_of_a_folder(tmp_path):
    model = opened(write_model("qwen3", tmp_path))
    assert model.architecture.hf_name == "Qwen3"
    config = model.config
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (4, 64, 96)
    assert (config.num_attention_heads, config.num_query_groups, config.head_dim) == (4, 2, 32)
    assert (config.qk_norm, config.qkv_bias, config.tie_word_embeddings) == (True, False, False)
    assert model.tokenizer.decode(model.tokenizer("1+2=")["input_ids"]) == "1+2="


def test_the_numbers_of_a_mixture_of_experts(tmp_path):
    write_model("qwen3-moe", tmp_path)
    model = open_model(ModelSource(path=str(tmp_path), dtype="float32", moe_aux_loss_coeff=0.5), seed=1)
    config = model.config
    assert model.architecture.hf_name == "Qwen3Moe"
    assert (config.num_experts, config.moe_topk, config.moe_ffn_hidden_size) == (4, 2, 24)
    assert (config.norm_topk_prob, config.moe_aux_loss_coeff) == (True, 0.5)


@pytest.mark.parametrize(
    "feature",
    [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"num_experts_per_tok": 1}],
    ids=lambda feature: next(iter(feature)),
)
def test_a_mixture_of_experts_that_is_not_built(tmp_path, feature):
    change_config(write_model("qwen3-moe", tmp_path), **feature)
    with pytest.raises(ModelError, match=next(iter(feature))):
        opened(tmp_path)


def test_a_missing_expert(tmp_path):
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    change_tensors(write_model("qwen3-moe", tmp_path), lambda tensors: tensors.pop(name))
    model = opened(tmp_path)
    with pytest.raises(ModelError, match=f"{name} is missing"):
        load([], model.architecture, model.config, model.source, topology=None)


def test_a_dense_model_has_no_load_to_balance(folder):
    with pytest.raises(ConfigError, match="model.moe_aux_loss_coeff=0.1 would have no effect"):
        open_model(ModelSource(path=str(folder), moe_aux_loss_coeff=0.1), seed=1)


def test_experts_have_the_names_and_values_that_transformers_writes(tmp_path):
    written = load_file(write_model("qwen3-moe", tmp_path) / "model.safetensors")
    found = on_disk(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(found[name], tensor), name


def test_an_output_layer_beside_the_embedding_that_it_is_said_to_be(tmp_path):
    folder = write_model("llama-tied", tmp_path)
    change_tensors(folder, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"].clone()}))
    model = opened(folder)
    load([], model.architecture, model.config, model.source, topology=None)
    change_tensors(folder, lambda x: x["lm_head.weight"].add_(1))
    model = opened(folder)
    with pytest.raises(ModelError, match="lm_head.weight is another tensor than the embedding"):
        load([], model.architecture, model.config, model.source, topology=None)


def sharded(folder):
    """The same weights in several files with an index."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def test_files_that_transformers_does_not_read_are_left_alone(folder):
    stray = {"model.embed_tokens.weight": torch.zeros(2, 2), "lora.weight": torch.zeros(3)}
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file(stray, folder / name)
    own = load_file(folder / "model.safetensors")
    for change in (lambda folder: None, sharded):
        change(folder)
        source = opened(folder).source
        assert sorted(source.names()) == sorted(own)
        assert torch.equal(source.read("model.embed_tokens.weight", 0, 0, 66), own["model.embed_tokens.weight"])


def test_a_shard_that_is_not_there_is_named(folder):
    first, *_ = sharded(folder)
    (folder / first).unlink()
    with pytest.raises(ModelError, match=f"index.json names {first}, which is not there; 1 files are missing"):
        opened(folder)


def test_a_tensor_in_two_files(folder):
    first, second, *_ = sharded(folder)
    save_file(load_file(folder / first), folder / second)
    with pytest.raises(ModelError, match=f"two files hold .*, {second} the second"):
        opened(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        ("model.safetensors", b"\x40\0\0\0\0\0\0\0{}", "no whole safetensors file"),
        ("model.safetensors.index.json", b"[]", "index.json cannot be read"),
        ("model.safetensors.index.json", b"{", "index.json cannot be read"),
        ("pytorch_model.bin", b"", "convert its pytorch_model files"),
        ("adapter_config.json", b"{}", "it is an adapter"),
        ("model-q4.gguf", b"", "GGUF files are not read"),
    ],
)
def test_weights_in_another_form(folder, name, content, said):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=said):
        opened(folder)


@pytest.mark.parametrize(("dtype", "named"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantised_weights_of_which_config_json_says_nothing(folder, dtype, named):
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ModelError, match=f"{name} is stored as {named}; quantized weights are not read"):
        opened(folder).source.read(name, 0, 0, 1)


def test_quantised_weights(folder):
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantization_config"):
        opened(folder)


def test_all_tokens_that_end_a_text_are_known(folder):
    eos = opened(folder).tokenizer.eos_token_id
    change_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert opened(folder).end_tokens == (eos,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 5]}))
    change_config(folder, eos_token_id=7)
    model = opened(folder)
    assert model.end_tokens == (5, 7, eos)
    engine = local_engine(load_config("train", []), model)
    greedy = SamplingParams(max_new_tokens=4)
    assert sorted(engine._stop_tokens(greedy).tolist()) == [5, 7, eos]
    assert engine._stop_tokens(replace(greedy, ignore_eos=True)).tolist() == []
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, "6"]}))
    with pytest.raises(ModelError, match="eos_token_id of generation_config.json names '6'; it must be a token id"):
        opened(folder)
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="generation_config.json cannot be read"):
        opened(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 66}))
    with pytest.raises(ModelError, match="generation_config.json names 66, but the model's vocabulary has 66"):
        opened(folder)


def test_a_critic_whose_tokenizer_is_another(folder, tmp_path):
    path = write_model("reward", tmp_path / "reward")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["3"], ids["4"] = ids["4"], ids["3"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="critic.path=.*'3' has id 3 there and id 4 here"):
        open_critic_of(opened(folder), path=str(path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    (path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match="critic.path=.*its tokenizer cannot be read"):
        open_critic_of(opened(folder), path=str(path))
    (path / "vocab.json").unlink()
    assert open_critic_of(opened(folder), path=str(path)).config.vocab_size == 66


def test_numbers_that_make_no_model(folder):
    change_config(folder, num_attention_heads=3)
    with pytest.raises(ModelError, match="config.json cannot be read"):
        opened(folder)


def open_critic_of(actor, **fields):
    return open_critic(CriticConfig(**fields), actor)


def test_a_critic_is_a_model_of_its_own(folder, tmp_path):
    actor = opened(folder)
    path = str(write_model("reward-qwen2", tmp_path / "reward"))
    critic = open_critic_of(actor, path=path, dtype="bfloat16")
    assert (critic.architecture.hf_name, critic.dtype, critic.tokenizer) == ("Qwen2", torch.bfloat16, actor.tokenizer)
    assert (critic.config.num_layers, critic.config.hidden_size, critic.config.num_attention_heads) == (8, 48, 6)
    assert "score.weight" in critic.source
    assert open_critic_of(actor) == actor


def test_a_critic_that_does_not_know_all_tokens(folder, tmp_path):
    path = write_model("reward-qwen2", tmp_path / "reward")
    change_config(path, vocab_size=60)
    with pytest.raises(ModelError, match="critic.path=.*has 60 tokens, that of the actor's model 66"):
        open_critic_of(opened(folder), path=str(path))


def test_a_critic_that_is_not_built(folder, tmp_path):
    path = write_model("reward", tmp_path / "reward")
    change_config(path, attention_bias=True)
    with pytest.raises(ModelError, match="critic.path=.*attention_bias"):
        open_critic_of(opened(folder), path=str(path))
    with pytest.raises(ModelError, match="critic.path=nowhere: no such folder"):
        open_critic_of(opened(folder), path="nowhere")


def test_only_a_mixture_of_experts_has_a_load_to_balance_in_the_critic_too(folder, tmp_path):
    experts = write_model("qwen3-moe", tmp_path / "experts")
    actor = open_model(ModelSource(path=str(experts), moe_aux_loss_coeff=0.5), seed=1)
    dense = str(write_model("reward", tmp_path / "reward"))
    assert open_critic_of(actor).config.moe_aux_loss_coeff == 0.5
    assert open_critic_of(actor, moe_aux_loss_coeff=0.1).config.moe_aux_loss_coeff == 0.1
    assert open_critic_of(actor, path=dense).config.moe_aux_loss_coeff == 0
    with pytest.raises(ConfigError, match="critic.moe_aux_loss_coeff=0.1 would have no effect: the critic is dense"):
        open_critic_of(actor, path=dense, moe_aux_loss_coeff=0.1)


def test_no_folder(tmp_path):
    with pytest.raises(ModelError, match="model.path=.*nowhere: no such folder"):
        opened(tmp_path / "nowhere")


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json"):
        opened(folder)


def test_an_unreadable_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="model.path=.*config.json cannot be read"):
        opened(folder)


def test_no_tensors(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor model.safetensors.index.json"):
        opened(folder)


def test_no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="model.path=.*tokenizer cannot be read"):
        opened(folder)


def test_an_unsupported_architecture(folder):
    config = GPT2Config(architectures=["GPT2LMHeadModel"]).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"):
        opened(folder)


@pytest.mark.parametrize(
    "feature",
    [
        {"attention_dropout": 0.1},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
    ids=lambda feature: next(iter(feature)),
)
def test_a_feature_that_is_not_built(folder, feature):
    change_config(folder, **feature)
    with pytest.raises(ModelError, match="linear" if "rope_parameters" in feature else next(iter(feature))):
        opened(folder)


def test_a_missing_tensor(folder):
    name = "model.layers.3.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"{name} is missing"):
        SafetensorsFolder(folder).read(name, 0, 0, 1)


def test_a_tensor_that_is_too_small(folder):
    name = "model.layers.3.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"{name} has 96 entries in dim 0, config.json asks for 97"):
        SafetensorsFolder(folder).read(name, 0, 0, 97)


def test_an_unknown_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    model = opened(folder)
    with pytest.raises(ModelError, match="model.layers.0.self_attn.q_proj.bias"):
        load([], model.architecture, model.config, model.source, topology=None)


def test_a_layer_that_the_config_does_not_have(folder):
    change_config(folder, num_hidden_layers=3)
    model = opened(folder)
    with pytest.raises(ModelError, match=r"model\.layers\.3\."):
        load([], model.architecture, model.config, model.source, topology=None)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_a_tensor(folder, dim):
    name = "model.layers.1.mlp.down_proj.weight"
    whole = load_file(folder / "model.safetensors")[name]
    assert torch.equal(SafetensorsFolder(folder).read(name, dim, 3, 11), whole.narrow(dim, 3, 8))


def test_a_folder_of_several_files(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    source = SafetensorsFolder(tmp_path / "sharded")
    assert sorted(source.names()) == sorted(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(source.read(name, 0, 0, len(parameter)), parameter)


def test_random_initialisation_is_transformers_own_shapes_and_the_seeds_values():
    from transformers import LlamaConfig

    config = LlamaConfig(**COMMON)
    one, again, other = (RandomInitialisation(config, seed) for seed in (1, 1, 2))
    shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    assert one.shapes == shapes
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(one.read(name, 0, 0, 96), again.read(name, 0, 0, 96))
    assert not torch.equal(one.read(name, 0, 0, 96), other.read(name, 0, 0, 96))
    assert torch.equal(one.read(name, 0, 0, 96)[10:20], one.read(name, 0, 10, 20))
