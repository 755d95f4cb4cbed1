"""Configurations composed: whatever Hydra refuses is one line, folders of one's own inherit, old names are known."""

import json
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

from mppo.cli.compose import all_paths, load_config
from mppo.cli.config_fields import all_fields
from mppo.cli.main import main
from mppo.cli.moved_names import MOVED, PREFIXES, moved
from mppo.config import Config
from mppo.errors import ConfigError
from tests.distributed.launch import torchrun

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.optim.lr=${nope}", "actor.optim.lr: Interpolation key 'nope' not found"),
        ("actor.optim.lr=${actor.optim.lr}", "actor.optim.lr: "),
        ("actor.optim.lr=${oc.env:MPPO_NO_SUCH_VARIABLE}", "Environment variable 'MPPO_NO_SUCH_VARIABLE' not found"),
        ("actor.optim.lr=???", "actor.optim.lr: Missing mandatory value"),
        ("model=nope", "Could not find 'model/nope' Available options in 'model': char char_moe smollm2"),
        ("+model=char", "model appears more than once in the final defaults list"),
        ("rollout.stop=[1,2", "rollout.stop=[1,2: no viable alternative at input '[1,2'"),
        ("foo", "missing EQUAL"),
        ("hydra.searchpath=[file:///nope]", "/nope is not available"),
        ("data.train.files=abc", "data.train.files is 'abc'; it must be a list, each of it a text"),
        ("rollout.stop_token_ids=[a]", "rollout.stop_token_ids is ['a']; it must be a list, each of it a whole number"),
        ("rollout.n=1.5", "rollout.n is 1.5; it must be a whole number"),
        ("rollout.n=null", "rollout.n is null; it must be a whole number"),
        ("rollout.ignore_eos=maybe", "rollout.ignore_eos is 'maybe'; it must be true or false"),
        ("strict=2", "strict is 2; it must be true or false"),
        ("critic.parallel.sequence_parallel=1", "critic.parallel.sequence_parallel is 1; it must be true or false"),
        ("trainer.out_dir=''", "trainer.out_dir is an empty text"),
        ("model.path=''", "model.path is an empty text"),
        ("data.train.files=['']", "data.train.files has an empty text"),
        ("actor.optim=[1]", "actor.optim=[1]: Cannot merge DictConfig with ListConfig"),
        ("algorithm.adv_options=3", "algorithm.adv_options is 3; it must be a mapping"),
        ("actor.optim=3", "actor.optim is 3; it is a group of fields: lr, "),
        ("critic=null", "critic is null; it is a group of fields: "),
        ("actor.optim.lr=-1", "actor.optim.lr is -1.0; it must be finite and greater than 0"),
        ("critic.optim.lr=-1", "critic.optim.lr is -1.0; it must be finite and greater than 0"),
        ("critic.recompute.modules=[x]", "critic.recompute.modules is 'x'; choose one of"),
        ("model.recompute.modules=[x]", "model.recompute.modules is 'x'; choose one of"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.1", "it is actor.policy_loss.clip_ratio_high here"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "it is actor.ppo_epochs here"),
        ("trainer.total_epochs=3", "it is trainer.total_training_steps here: counted in training steps"),
        ("learning_rate=3", "it is actor.optim.lr here"),
        ("rollout-batch-size=3", "it is data.train_batch_size here"),
        ("critic.optim.warmup_style=cosine", "it is critic.optim.lr_decay_style here"),
        ("trainer.nnodes=3", "processes are torchrun's to say"),
        ("rollout.m=3", "unknown field 'rollout.m'"),
        ("actor.optim.weight_decays=1", "did you mean 'actor.optim.weight_decay'?"),
    ],
)
def test_what_cannot_be_composed_is_one_line(override, said):
    with pytest.raises(ConfigError) as raised:
        load_config("class", [override])
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert raised.value.on_every_rank


FILES = {
    "broken": "actor: [1\n",
    "list": "- 1\n",
    "twice": "rollout: {n: 1}\nrollout: {n: 2}\n",
    "whole": "defaults: [class, _self_]\nactor: {optim: {lr: 0.5}}\n",
    "groups": "defaults: [{model: own}, {algorithm: gae}, {parallel: pp2}, _self_]\n",
    "class": "defaults: [{model: char}]\nrollout: {n: 7}\n",
    "model/own": "preset: char-moe\n",
    "parallel/pp2": "pipeline_model_parallel_size: 3\n",
}


@pytest.fixture
def own(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return str(tmp_path)


def test_a_folder_of_ones_own_inherits_files_and_groups_and_comes_first(own):
    groups = load_config("groups", ["model.dtype=float32"], own)
    assert (groups.model.preset, groups.algorithm.adv_estimator) == ("char-moe", "gae")
    assert groups.parallel.pipeline_model_parallel_size == 3
    assert load_config("class", [], own).rollout.n == 7
    whole = load_config("whole", [], own)
    assert (whole.actor.optim.lr, whole.rollout.n) == (0.5, 7)
    assert load_config("quickstart", ["model=char"], own).data.train.generator == "addition"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "expected ',' or ']'"),
        ("list", "must be a DictConfig"),
        ("twice", "found duplicate key rollout"),
        (
            "claas",
            "there are broken, class, groups, list, offset, quickstart, sft, train, twice, whole; did",
        ),
    ],
)
def test_a_file_that_is_no_configuration(own, name, said):
    with pytest.raises(ConfigError) as raised:
        load_config(name, [], own)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_the_search_path_of_a_file_is_read(tmp_path):
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other" / "there.yaml").write_text("rollout: {n: 5}\n")
    file = tmp_path / "own" / "mine.yaml"
    for place in (tmp_path / "other", tmp_path / "nowhere"):
        file.write_text(f"defaults: [class, there, _self_]\nhydra: {{searchpath: ['file://{place}']}}\n")
        if place.is_dir():
            assert load_config("mine", [], str(file.parent)).rollout.n == 5
        else:
            with pytest.raises(ConfigError, match="path=.*nowhere is not available"):
                load_config("mine", [], str(file.parent))


@pytest.mark.filterwarnings("error")
def test_a_file_without_self_in_its_defaults_comes_after_them(own):
    assert load_config("class", [], own).rollout.n == 7


def test_an_option_of_another_trainer_is_told_what_it_is_here(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--config-name", "class", "--eps-clip", "0.2"])
    assert "--eps-clip: it is actor.policy_loss.clip_ratio here" in capsys.readouterr().err


def test_a_folder_that_is_not_there():
    with pytest.raises(ConfigError, match="--config-dir: .*nowhere: no such folder"):
        load_config("class", [], "nowhere")


def test_every_name_that_moved_leads_to_a_field_that_there_is():
    paths = {*all_paths(Config, ""), *(line.path for line in all_fields())}
    for entry in MOVED:
        assert entry.new in {*paths, "actor.policy_loss.loss_mode"} or (not entry.new and entry.word), entry
        assert not [path for path in paths if fnmatchcase(path, entry.old)], f"{entry.old} is a field"
    for prefix, here in PREFIXES.items():
        assert here.removesuffix(".") in paths
        assert moved(f"{prefix}anything")


def test_every_field_and_knob_has_a_type_a_default_and_a_documentation(capsys):
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {line["path"] for line in found} >= {
        "actor.optim.lr",
        "actor.policy_loss.clip_ratio",
        "rollout.val_kwargs.n",
    }
    assert [line["path"] for line in found if not all(line[k] for k in ("type", "default", "documentation"))] == []
    assert main(["config", "actor.optim.lr*", "warm-up"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines == [
        "actor.optim.lr: float = 1e-06",
        "actor.optim.lr_warmup_steps: int = 0",
        "actor.optim.lr_decay_steps: int | None = null",
    ]
    assert main(["config", "cliprange*"]) == 0
    assert capsys.readouterr().out.startswith("critic.cliprange_value: float = 0.5\n")
    assert main(["config", "nothing-like-it"]) == 2


def test_an_error_is_said_once_whatever_the_number_of_ranks(tmp_path):
    for arguments, said in (
        (("actor.optim.lr=${nope}",), "Interpolation key 'nope' not found"),
        (("parallel=single", "data.train.generator=null", "data.train.files=[nowhere]"), "nowhere: no such file"),
        (("--no-such-option",), "unrecognized arguments"),
    ):
        finished = torchrun(2, "-m", "mppo", "train", "--config-name=class", *arguments, f"trainer.out_dir={tmp_path}")
        assert finished.returncode != 0
        assert (finished.stdout + (finished.stderr or "")).count(said) == 1, said


def test_the_command_line_of_a_process_by_itself():
    finished = subprocess.run(
        [sys.executable, "-m", "mppo", "plan", "--config-name", "nope"], capture_output=True, text=True
    )
    assert finished.returncode == 2 and finished.stderr.startswith(
        "mppo: ConfigError: --config-name nope: no such file"
    )
