"""Exported folders: what did not change is as it was, and every transformers reads the same.

Where MPPO_OLD_TRANSFORMERS names a folder with another version of the package (`pip install --target FOLDER
"transformers==4.57.*"`), that is compared with the installed one.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from mppo.config import ModelSource
from mppo.weights.folder_files import write_folder_files
from mppo.weights.pretrained import PretrainedModel, open_model
from tests.distributed.model_folders import LLAMA3_ROPE, write_model
from tests.unit.folder_reader import read

pytestmark = pytest.mark.unit

OLD = os.environ.get("MPPO_OLD_TRANSFORMERS")
SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
MODELS = ("llama", "llama-tied", "llama-rope", "qwen2", "qwen3", "qwen3-moe")


def exported(model: PretrainedModel, target: Path) -> Path:
    """Without the weights, which are those of the folder it was opened from."""
    target.mkdir()
    write_folder_files(model, target)
    if model.folder is not None:
        shutil.copyfile(model.folder / "model.safetensors", target / "model.safetensors")
    return target


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each model the folder it came from, and the exported one."""
    place, found = tmp_path_factory.mktemp("folders"), {}
    for name in MODELS:
        source = write_model(name, place / name)
        model = open_model(ModelSource(path=str(source), dtype="float32"), seed=1)
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 64], "temperature": 0.6}))
        found[name] = source, exported(model, place / f"{name}-exported")
    return found


def test_what_did_not_change_is_as_it_was(folders, tmp_path):
    for name, (source, target) in folders.items():
        kept = {path.name for path in source.iterdir()} - {"config.json", "tokenizer_config.json"}
        assert {"tokenizer.json", "generation_config.json", "model.safetensors"} <= kept
        for file in kept:
            assert (target / file).read_bytes() == (source / file).read_bytes(), (name, file)


def test_fields_that_mppo_does_not_know_stay(tmp_path):
    source = write_model("llama", tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config_of(source) | {"a_field_of_its_own": {"x": [1]}}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    model = open_model(ModelSource(path=str(source), dtype="bfloat16"), seed=1)
    target = exported(model, tmp_path / "target")
    assert config_of(target)["a_field_of_its_own"] == {"x": [1]}
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"


def test_dtype_and_rotary_embedding_are_said_in_both_spellings(folders, tmp_path):
    config = config_of(folders["llama-rope"][1])
    assert (config["dtype"], config["torch_dtype"], config["rope_theta"]) == ("float32", "float32", 10000.0)
    assert config["rope_scaling"] == SCALING
    assert config["rope_parameters"] == SCALING | {"rope_theta": 10000.0}
    assert config_of(folders["qwen3"][1])["rope_scaling"] is None
    experts = config_of(folders["qwen3-moe"][1])
    assert (experts["num_experts"], experts["num_local_experts"]) == (4, 4)
    source = tmp_path / "old"
    shutil.copytree(folders["llama-rope"][0], source)
    old = {k: v for k, v in config_of(source).items() if k != "rope_parameters"}
    old |= {"rope_theta": 500000.0, "rope_scaling": SCALING, "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(old))
    target = exported(open_model(ModelSource(path=str(source), dtype="float32"), seed=1), tmp_path / "again")
    assert config_of(target)["rope_theta"] == 500000.0
    assert config_of(target)["rope_parameters"] == SCALING | {"rope_theta": 500000.0}


def test_special_tokens_are_named_as_every_version_reads_them(tmp_path):
    source = write_model("llama", tmp_path / "source")
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": ["<think>"]}))
    target = exported(open_model(ModelSource(path=str(source), dtype="float32"), seed=1), tmp_path / "target")
    config = json.loads((target / "tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == ["<think>"] and "extra_special_tokens" not in config
    assert "<think>" in AutoTokenizer.from_pretrained(target).all_special_tokens


def test_a_preset_has_a_tokenizer_that_every_version_knows(tmp_path):
    target = exported(open_model(ModelSource(preset="char", dtype="float32"), seed=1), tmp_path / "preset")
    assert json.loads((target / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config_of(target)["architectures"] == ["LlamaForCausalLM"]


def test_the_installed_transformers_reads_the_same_of_both_folders(folders):
    for name, (source, target) in folders.items():
        assert read(str(target)) == read(str(source)), name


@pytest.mark.skipif(not OLD, reason="MPPO_OLD_TRANSFORMERS names no folder with another version of transformers")
def test_another_transformers_reads_the_same(folders):
    targets = {name: str(target) for name, (_, target) in folders.items()}
    script = Path(__file__).with_name("folder_reader.py")
    environment = os.environ | {"PYTHONPATH": OLD}
    command = [sys.executable, str(script), *targets.values()]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    other = json.loads(finished.stdout.splitlines()[-1])
    assert other["version"].startswith("4.")
    for name, target in targets.items():
        own, found = read(target), other["folders"][target]
        torch.testing.assert_close(
            torch.tensor(found.pop("log_probs")), torch.tensor(own.pop("log_probs")), rtol=0, atol=1e-5
        )
        assert found == own, name
