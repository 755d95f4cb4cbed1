"""`mppo plan`: what a configuration does, estimated and simulated, without launching it."""

import argparse
import json
from dataclasses import asdict, dataclass, fields
from math import lcm

from rich.console import Console

from mppo.cli.compose import load_config
from mppo.config import ParallelConfig
from mppo.errors import ConfigError
from mppo.megatron.topology import data_parallel_size
from mppo.planning.control_plane import ControlPlane, print_control_plane, simulate
from mppo.planning.estimate import Estimate, estimate_actor, mix_of
from mppo.planning.estimate.device_memory import OnDevice, on_device
from mppo.planning.estimate.tables import print_estimate, print_roles
from mppo.planning.machines import Links
from mppo.planning.refit import Refit, plan_refit
from mppo.planning.refit_table import print_refit
from mppo.planning.run_plan import make_plan, print_plan
from mppo.trainer.assemble import in_words, read_prompts
from mppo.trainer.model_checks import check_models
from mppo.trainer.run_spec import RunSpec, make_run_spec
from mppo.weights.pretrained import PretrainedModel, open_critic, open_model

LINKS = tuple(f.name for f in fields(Links))
LENGTHS = ("lengths", "prompt_tokens", "response_tokens", "response_sigma")


@dataclass(frozen=True)
class OfModel:
    """What is said where a model is given."""

    estimate: Estimate
    """The actor."""
    on_device: list[OnDevice]
    """Of all roles."""
    data: str | None
    """What was read of prompts, in words."""
    control_plane: list[ControlPlane] | None
    weights_to_sglang: Refit | None
    """With rollout.engine=sglang."""


def plan(options: argparse.Namespace) -> int:
    """Print the plan, and where a model is given the estimate and, if it is asked for, the simulation.

    Raises ConfigError for an option that has no effect, or that a run would be refused with.
    """
    config = load_config(options.config_name, options.overrides, options.config_dir)
    world_size = _replica(config.parallel) if options.world_size is None else options.world_size
    if world_size < 1:
        raise ConfigError(f"--world-size is {world_size}; it must be at least 1")
    spec = make_run_spec(config, data_parallel_size(config.parallel, world_size))
    planned, of_model = make_plan(spec, world_size), None
    if config.model.path or config.model.preset:
        of_model = _of_model(options, spec)
    else:
        _refuse(options, (*LENGTHS, "control_plane", *LINKS), "without a model: give model.path or model.preset")
    if options.json:
        found = dict.fromkeys(f.name for f in fields(OfModel)) if of_model is None else asdict(of_model)
        print(json.dumps(asdict(planned) | found, indent=2))
        return 0
    console = Console()
    print_plan(planned, console)
    if of_model is not None:
        print_estimate(of_model.estimate, console)
        print_roles(of_model.on_device, console)
        if of_model.data:
            console.print(of_model.data, highlight=False)
        if of_model.control_plane:
            print_control_plane(of_model.control_plane, spec.trajectories, console)
        if of_model.weights_to_sglang:
            print_refit(of_model.weights_to_sglang, console)
    return 0


def _replica(parallel: ParallelConfig) -> int:
    """The least number of processes."""
    pp = parallel.pipeline_model_parallel_size
    return pp * lcm(parallel.model_parallel_size // pp, parallel.expert_model_parallel_size)


def _of_model(options: argparse.Namespace, spec: RunSpec) -> OfModel:
    config = spec.config
    opened = open_model(config.model, config.trainer.seed)
    critic = open_critic(config.critic, opened).config if spec.critic else None
    model = opened.config
    check_models(spec, model, critic)
    data = in_words(*read_prompts(config, opened)) if config.data.train.given else None
    mix = mix_of(config.data, options.lengths, options.prompt_tokens, options.response_tokens, options.response_sigma)
    simulated = None
    if options.control_plane:
        lengths = mix.step(spec.trajectories)
        simulated = [simulate(spec, model, lengths, ranks) for ranks in _ranks(options.control_plane)]
    actor = estimate_actor(spec, model, mix)
    roles = on_device(spec, model, critic, actor, mix)
    return OfModel(actor, roles, data, simulated, _refit(options, spec, opened))


def _refit(options: argparse.Namespace, spec: RunSpec, opened: PretrainedModel) -> Refit | None:
    if spec.config.rollout.engine != "sglang":
        _refuse(options, LINKS, "but with rollout.engine=sglang")
        return None
    given = {name: getattr(options, name) for name in LINKS if getattr(options, name) is not None}
    return plan_refit(spec, opened.architecture, opened.config, Links(**given))


def _refuse(options: argparse.Namespace, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect {where}")


def _ranks(given: str) -> list[int]:
    try:
        ranks = [int(number) for number in given.split(",")]
    except ValueError:
        ranks = [0]
    if min(ranks) <= 0:
        raise ConfigError(f"--control-plane={given}: it must be numbers of ranks with commas between them: 8,64,512")
    return ranks
