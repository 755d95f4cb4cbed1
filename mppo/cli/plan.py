"""`mppo plan`: what a configuration does, estimated and simulated, without launching it."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from mppo.cli.compose import load_config
from mppo.errors import ConfigError
from mppo.megatron.topology import check_layout, data_parallel_size
from mppo.trainer.control_plane import print_control_plane, simulate
from mppo.trainer.estimate import estimate_actor, mix_of
from mppo.trainer.estimate.tables import print_estimate
from mppo.trainer.plan import make_plan, print_plan
from mppo.trainer.resolve import Resolved, resolve
from mppo.weights.pretrained import read_critic_config, read_model_config


def plan(options: argparse.Namespace) -> int:
    """Print the plan, and where a model is given the estimate and, if it is asked for, the simulation."""
    config = load_config(options.config_name, options.overrides, options.config_dir)
    parallel = config.parallel
    replica = (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )
    world_size = options.world_size or replica
    resolved = resolve(config, data_parallel_size(parallel, world_size))
    found: dict[str, Any] = {"estimate": None, "control_plane": None}
    if config.model.path or config.model.preset:
        found = _of_model(options, resolved)
    elif options.control_plane:
        raise ConfigError("--control-plane balances by the cost of the model: give model.path or model.preset")
    planned = make_plan(resolved, world_size)
    if options.json:
        print(json.dumps(asdict(planned) | found, default=asdict, indent=2))
        return 0
    console = Console()
    print_plan(planned, console)
    if found["estimate"] is not None:
        print_estimate(found["estimate"], console)
    if found["control_plane"] is not None:
        print_control_plane(found["control_plane"], resolved.trajectories, console)
    return 0


def _of_model(options: argparse.Namespace, resolved: Resolved) -> dict[str, Any]:
    """The estimate and the simulation."""
    config = resolved.config
    model = read_model_config(config.model)
    critic = resolved.critic and (resolved.critic_parallel, read_critic_config(config.critic, model))
    check_layout(config.parallel, model, critic)
    mix = mix_of(config.data, options.lengths, options.prompt_tokens, options.response_tokens, options.response_sigma)
    simulated = None
    if options.control_plane:
        lengths = mix.step(resolved.trajectories)
        simulated = [simulate(resolved, model, lengths, ranks) for ranks in _ranks(options.control_plane)]
    return {"estimate": estimate_actor(resolved, model, mix), "control_plane": simulated}


def _ranks(given: str) -> list[int]:
    try:
        ranks = [int(number) for number in given.split(",")]
    except ValueError:
        ranks = [0]
    if min(ranks) <= 0:
        raise ConfigError(f"--control-plane={given}: it must be numbers of ranks with commas between them: 8,64,512")
    return ranks
