"""Configuration files and overrides become a typed Config, or an error that names the field."""

import re
from dataclasses import fields, is_dataclass

import pytest

from mppo.algorithm.policy_losses import TokenLosses
from mppo.cli.compose import default_config_dir, load_config
from mppo.config import Config
from mppo.errors import ConfigError
from mppo.trainer.model_checks import check_models
from mppo.trainer.run_spec import Anchor, make_run_spec
from mppo.weights.pretrained import read_model_config

pytestmark = pytest.mark.unit


def config_with(*overrides: str) -> Config:
    return load_config("train", ["actor.ppo_micro_batch_size_per_gpu=2", *overrides])


@pytest.mark.parametrize("name", sorted(p.stem for p in default_config_dir().glob("*.yaml") if p.stem != "train"))
def test_every_shipped_configuration_resolves(name):
    spec = make_run_spec(load_config(name, []), data_parallel_size=1)
    assert spec.trajectories == spec.config.data.train_batch_size * spec.config.rollout.n


def test_a_group_is_chosen_by_name_and_its_fields_can_still_be_set():
    config = load_config("class", ["parallel=pp2", "algorithm=gae", "algorithm.adv_options.lam=0.9"])
    assert config.parallel.tensor_model_parallel_size == 1
    assert (config.algorithm.adv_estimator, config.algorithm.adv_options["lam"]) == ("gae", 0.9)
    with pytest.raises(ConfigError, match="tp3"):
        load_config("class", ["parallel=tp3"])


def test_overrides_set_fields_that_no_file_mentions():
    config = config_with("actor.optim.lr=3e-5", "actor.policy_loss.clip_ratio=0.3")
    assert config.actor.optim.lr == 3e-5
    assert config.actor.policy_loss == {"clip_ratio": 0.3}


def test_clip_ratio_sets_both_sides_unless_a_side_is_given():
    spec = make_run_spec(config_with("actor.policy_loss.clip_ratio=0.3", "actor.policy_loss.clip_ratio_high=0.5"), 1)
    loss_config = spec.policy_loss.fn.keywords["config"]
    assert (loss_config.low, loss_config.high) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor.optim.learning_rate=1", "unknown field 'actor.optim.learning_rate'"),
        ("actor.ppo_epoch=2", "did you mean 'actor.ppo_epochs'"),
        ("actor.total_training_steps=2", "did you mean 'trainer.total_training_steps'"),
        ("nonsense=1", "unknown field 'nonsense'"),
        ("actor.ppo_epochs=often", "actor.ppo_epochs"),
        ("actor.ppo_epochs=0", "actor.ppo_epochs is 0"),
        ("actor.ppo_max_token_len_per_gpu=9", "actor.ppo_max_token_len_per_gpu has no effect"),
        ("actor.use_dynamic_bsz=true", "actor.ppo_micro_batch_size_per_gpu has no effect"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel has no effect"),
        ("parallel.virtual_pipeline_model_parallel_size=2", "needs pipeline_model_parallel_size"),
        ("data.overlong_prompts=drop", "data.overlong_prompts is 'drop'"),
        ("model.dtype=float16", "model.dtype is 'float16'"),
        ("critic.dtype=float16", "critic.dtype is 'float16'"),
        ("critic.moe_aux_loss_coeff=-1", "critic.moe_aux_loss_coeff is -1"),
        ("critic.parallel.virtual_pipeline_model_parallel_size=0", "critic.parallel.virtual_pipeline_model_parallel"),
        ("critic.parallel.tensor_model_parallel_size=2", "unknown field 'critic.parallel.tensor_model_parallel_size'"),
        ("critic.recompute.modules=[mlp]", "recompute.modules has no effect"),
        ("rollout.top_p=0", "rollout.top_p is 0"),
        ("actor.optim.min_lr=1e-7", "optim.min_lr has no effect"),
        ("actor.optim.lr=nan", "optim.lr is nan"),
        ("actor.optim.lr=inf", "optim.lr is inf"),
        ("actor.optim.clip_grad=inf", "optim.clip_grad is inf"),
        ("rollout.stop=['']", "rollout.stop has an empty text"),
        ("rollout.stop_token_ids=[-5]", "rollout.stop_token_ids is [-5]"),
        ("model.recompute={granularity: selective, modules: []}", "recompute.modules is empty"),
        ("actor.optim.weight_decay=-1", "optim.weight_decay is -1"),
        ("actor.optim.adam_beta1=2", "optim.adam_beta1 is 2"),
        ("actor.optim.lr_warmup_steps=-1", "optim.lr_warmup_steps is -1"),
        ("actor.loss_scale_factor=0", "actor.loss_scale_factor is 0"),
        ("actor.kl_loss_coef=-1", "actor.kl_loss_coef is -1"),
        ("trainer.seed=-1", "trainer.seed is -1"),
        ("trainer.save_freq=-1", "trainer.save_freq is -1"),
    ],
)
def test_a_bad_field_is_named_when_the_configuration_is_read(override, named):
    with pytest.raises(ConfigError) as caught:
        config_with(override)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.adv_estimator=grop", "did you mean 'grpo'"),
        ("actor.policy_loss.loss_mode=vanila", "did you mean 'vanilla'"),
        ("actor.policy_loss.clip_cov_ratio=1", "actor.policy_loss.clip_cov_ratio"),
        ("algorithm.adv_options.lam=0.9", "algorithm.adv_options.lam: 'grpo' does not read this knob"),
        ("reward.function=exact", "unknown reward 'exact'"),
        ("reward.options.fold=true", "reward.options.fold"),
        ("actor.loss_agg_mode=mean", "unknown aggregation mode 'mean'"),
        ("actor.kl_loss_type=k4", "unknown KL form 'k4'"),
        ("critic.ppo_epochs=2", "critic is set but would have no effect"),
        ("critic.parallel.sequence_parallel=false", "critic is set but would have no effect"),
        ("ref.placement=device", "ref is set but would have no effect"),
        ("actor.kl_loss_coef=0.1", "actor.kl_loss_coef is set but would have no effect"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_ctrl is set but would have no effect"),
        ("actor.loss_scale_factor=100", "actor.loss_scale_factor is set"),
        ("trainer.test_freq=5", "trainer.test_freq is set but would have no effect"),
        ("trainer.val_before_train=false", "trainer.val_before_train is set but would have no effect"),
        ("trainer.keep_checkpoints=2", "trainer.keep_checkpoints has no effect with trainer.save_freq=0"),
        ("data.train={generator: class, options: {sise: 3}}", "data.train.options.sise"),
    ],
)
def test_a_contradiction_is_named_when_the_configuration_is_resolved(override, named):
    with pytest.raises(ConfigError) as caught:
        make_run_spec(config_with(override), data_parallel_size=1)
    assert named in str(caught.value)


def test_one_number_is_no_parts_of_a_reward():
    parts = ["algorithm.adv_estimator=gdpo", "algorithm.adv_options={gdpo_reward_keys: [right]}"]
    with pytest.raises(ConfigError, match="reward.on_error=score .* gdpo reads parts"):
        make_run_spec(config_with(*parts, "reward.on_error=score", "reward.error_score=0"), data_parallel_size=1)


def test_groups_of_one_are_nothing_to_warn_of_where_answers_are_given():
    one = config_with("rollout.n=1", "strict=true")
    with pytest.raises(ConfigError, match="groups of one"):
        make_run_spec(one, data_parallel_size=1)
    assert make_run_spec(one, data_parallel_size=1, supervised=True).warnings == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.recompute={granularity: full, num_layers: 3}", "model.recompute.num_layers=3 does not divide the 2"),
        ("model.recompute={granularity: selective, modules: [moe]}", "model.recompute.modules names moe"),
        ("rollout.stop_token_ids=[99999]", "rollout.stop_token_ids names 99999"),
        ("data.max_response_length=9999", "positions for"),
    ],
)
def test_what_the_model_has_no_place_for(override, named):
    config = config_with("model.preset=char", override)
    model = read_model_config(config.model)
    with pytest.raises(ConfigError, match=named):
        check_models(make_run_spec(config, data_parallel_size=1), model, None)


@pytest.mark.parametrize("options", ["{num_attention_heads: 3}", "{hidden_size: wide}"])
def test_options_that_make_no_model(options):
    with pytest.raises(ConfigError, match="model.preset_options: "):
        read_model_config(config_with("model.preset=char", f"model.preset_options={options}").model)


def test_without_a_limit_a_micro_batch_is_one_trajectory_or_the_longest():
    spec = make_run_spec(load_config("train", []), data_parallel_size=1)
    assert (spec.actor.limit.trajectories, spec.actor.limit.tokens) == (1, None)
    lengths = ("data.max_prompt_length=10", "data.max_response_length=7")
    by_tokens = (*lengths, "actor.use_dynamic_bsz=true")
    spec = make_run_spec(load_config("train", [*by_tokens]), data_parallel_size=1)
    assert (spec.actor.limit.tokens, spec.actor.infer_limit.tokens) == (18, 18)
    cut = [
        f"parallel.{x}" for x in ("tensor_model_parallel_size=4", "sequence_parallel=true", "context_parallel_size=2")
    ]
    warnings = make_run_spec(load_config("train", [*by_tokens, *cut]), 1).warnings
    assert not [warning for warning in warnings if "micro-batch" in warning]


def test_both_kl_paths_warn_with_both_coefficients_and_strict_refuses():
    both = ("actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true", "rollout.n=2")
    (warning,) = make_run_spec(config_with(*both), 1).warnings
    assert "actor.kl_loss_coef=0.001" in warning and "algorithm.kl_ctrl.kl_coef=0.001" in warning
    with pytest.raises(ConfigError, match="strict=true"):
        make_run_spec(config_with(*both, "strict=true"), 1)


def test_the_critic_inherits_the_actors_limits_and_mode_and_may_have_its_own():
    gae = ("algorithm.adv_estimator=gae", "actor.loss_agg_mode=seq-mean-token-sum")
    inherited = make_run_spec(config_with(*gae), 1)
    assert inherited.critic.limit == inherited.actor.limit
    assert inherited.critic.loss_agg_mode == "seq-mean-token-sum"
    own = make_run_spec(
        config_with(
            *gae,
            "critic.use_dynamic_bsz=true",
            "critic.ppo_max_token_len_per_gpu=64",
            "critic.ppo_infer_max_token_len_per_gpu=128",
            "critic.loss_agg_mode=token-mean",
            "critic.ppo_mini_batch_size=4",
            "critic.ppo_epochs=3",
        ),
        1,
    ).critic
    assert (own.limit.tokens, own.infer_limit.tokens) == (64, 128)
    assert (own.loss_agg_mode, own.prompts, own.epochs) == ("token-mean", 4, 3)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("kind", ["micro_batch_size_per_gpu", "max_token_len_per_gpu"])
def test_the_limits_of_both_passes_of_both_roles_are_read_and_know_their_field(role, kind):
    by_tokens, own = kind == "max_token_len_per_gpu", "log_prob" if role == "actor" else "ppo_infer"
    given = {f"{role}.use_dynamic_bsz": str(by_tokens).lower(), f"{role}.ppo_{kind}": 64, f"{role}.{own}_{kind}": 128}
    overrides = [f"{field}={value}" for field, value in given.items()]
    if role == "critic" or by_tokens:
        overrides.append(f"actor.ppo_micro_batch_size_per_gpu={2 if role == 'critic' else 'null'}")
    spec = make_run_spec(load_config("train", ["algorithm.adv_estimator=gae", *overrides]), 1)
    settings = getattr(spec, role)
    what = "tokens" if by_tokens else "trajectories"
    limits = [settings.limit, settings.infer_limit]
    assert [(limit.field, getattr(limit, what)) for limit in limits] == [
        (f"{role}.ppo_{kind}", 64), (f"{role}.{own}_{kind}", 128),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "least"),
    [
        (1, 1, False, 21),  # the longest trajectory
        (2, 1, False, 12),  # padded to a multiple of 2 cp: 24
        (4, 1, False, 6),
        (1, 2, True, 22),  # cut evenly over tensor-parallel ranks
        (2, 4, True, 12),
        (4, 4, True, 8),  # the 6 of its slice are padded to a multiple of 4
    ],
)
def test_a_token_budget_is_short_only_where_the_longest_padded_trajectory_does_not_fit(
    cp, tp, sequence_parallel, least
):
    layout = (
        f"parallel.context_parallel_size={cp}",
        f"parallel.tensor_model_parallel_size={tp}",
        f"parallel.sequence_parallel={str(sequence_parallel).lower()}",
    )

    def short(budget):
        lengths = ("data.max_prompt_length=10", "data.max_response_length=11", "actor.use_dynamic_bsz=true")
        config = load_config("train", [*lengths, *layout, f"actor.ppo_max_token_len_per_gpu={budget}"])
        return [warning for warning in make_run_spec(config, 1).warnings if "will stop the run" in warning]

    assert (short("null"), short(least)) == ([], [])
    (warning,) = short(least - 1)
    assert warning.startswith(f"actor.ppo_max_token_len_per_gpu={least - 1} makes a micro-batch of ")


ONE_STEP = ("rollout.n=2", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "prompts", "anchor"),
    [
        ((), 8, Anchor.CURRENT_POLICY),
        ((), 7, Anchor.CURRENT_POLICY),
        ((), 9, Anchor.OWN_PASS),
        (("actor.ppo_epochs=2",), 8, Anchor.OWN_PASS),
        (("actor.ppo_mini_batch_size=4",), 8, Anchor.OWN_PASS),
        (("actor.ppo_mini_batch_size=4",), 4, Anchor.CURRENT_POLICY),
        (("actor.old_log_prob_pass=always",), 8, Anchor.OWN_PASS),
        ((f"{CORRECTION}.rollout_is=token",), 8, Anchor.OWN_PASS),
        (("algorithm.use_kl_in_reward=true",), 8, Anchor.OWN_PASS),
        (("algorithm.adv_estimator=optimal_token_baseline",), 8, Anchor.OWN_PASS),
        (("actor.policy_loss.loss_mode=kl_cov",), 8, Anchor.OWN_PASS),
        ((f"{CORRECTION}.bypass_mode=true",), 8, Anchor.ROLLOUT_POLICY),
        ((f"{CORRECTION}.bypass_mode=true",), 9, Anchor.ROLLOUT_POLICY),
    ],
)
def test_the_anchor_depends_on_who_reads_it_and_on_how_many_prompts_there_really_are(overrides, prompts, anchor):
    assert make_run_spec(config_with(*ONE_STEP, *overrides), 1).anchor(prompts) is anchor


TWO_BY_TWO = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
VPP2 = "parallel.virtual_pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "sequence_parallel", "vpp"),
    [
        (("parallel.sequence_parallel=true", VPP2), True, 2),
        (("critic.parallel.sequence_parallel=true", f"critic.{VPP2}"), True, 2),
        (("parallel.sequence_parallel=true", "critic.parallel.sequence_parallel=false"), False, None),
        ((VPP2, "critic.parallel.virtual_pipeline_model_parallel_size=1"), False, None),
        ((VPP2, "critic.parallel.virtual_pipeline_model_parallel_size=4"), False, 4),
    ],
)
def test_the_critics_layout_is_the_actors_but_for_what_it_is_given(overrides, sequence_parallel, vpp):
    spec = make_run_spec(config_with("algorithm.adv_estimator=gae", *TWO_BY_TWO, *overrides), 1)
    own = spec.critic_parallel
    assert (own.tensor_model_parallel_size, own.pipeline_model_parallel_size) == (2, 2)
    assert (own.sequence_parallel, own.virtual_pipeline_model_parallel_size) == (sequence_parallel, vpp)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("critic.parallel.sequence_parallel=true", "no effect at parallel.tensor_model_parallel_size=1"),
        (f"critic.{VPP2}", "needs parallel.pipeline_model_parallel_size of at least 2"),
    ],
)
def test_a_layout_of_the_critic_that_the_process_groups_leave_no_place_for(override, said):
    with pytest.raises(ConfigError, match=said) as caught:
        make_run_spec(config_with("algorithm.adv_estimator=gae", override), 1)
    assert override.partition("=")[0] in str(caught.value)


def test_a_loss_by_import_path_is_found():
    loss = make_run_spec(
        config_with("actor.policy_loss.loss_mode=tests.unit.test_config:a_loss_of_ones_own"), 1
    ).policy_loss
    assert (loss.fn, loss.loss_agg_mode) == (a_loss_of_ones_own, "token-mean")


def a_loss_of_ones_own(x):
    return TokenLosses(-x.advantages * x.log_probs)


def field_paths(schema, where=""):
    for field in fields(schema):
        if is_dataclass(field.type):
            yield from field_paths(field.type, f"{where}{field.name}.")
        else:
            yield where + field.name


def test_every_field_is_read_by_code_that_names_its_group():
    """No dead knobs: each leaf of the typed configuration is read as an attribute outside mppo/config.

    Left out are the limits of micro-batches, which a test of their own looks at.
    """
    package = default_config_dir().parent / "mppo"
    sources = "\n".join(p.read_text() for p in package.rglob("*.py") if p.parent.name != "config")
    attributes = set(re.findall(r"\b(\w+)(?=\.(\w+)\b)", sources))
    short = {"config": ["config", "cfg"], "optim": ["config", "optim"], "overlong_buffer": ["buffer"]}
    short |= {"filter_groups": ["filtering"], "val_kwargs": ["drawn", "val_kwargs"], "rollout": ["drawn"]}
    unread = []
    for path in field_paths(Config):
        group, _, name = path.rpartition(".")
        owner = group.rpartition(".")[2]
        owners = {owner, owner + "s", "role", "config", "source", "settings", "control", "given", *short.get(owner, [])}
        if not name.endswith("_per_gpu") and not any((o, name) in attributes for o in owners):
            unread.append(path)
    assert unread == []
