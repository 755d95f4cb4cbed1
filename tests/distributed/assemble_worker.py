"""What a configuration is assembled to, without training; runs on every rank."""

from pathlib import Path

from megatron.core.utils import get_model_config

from mppo.cli.compose import load_config
from mppo.megatron import topology
from mppo.trainer.assemble import assemble
from mppo.trainer.roles import TrainableRole


def described(role: TrainableRole) -> dict:
    """How it is cut and recomputed, and bytes that rest in host memory during an update and after it."""
    config = get_model_config(role.chunks[0])
    with role.onloaded():
        role.optimizer.step()
        onloaded = {name: getattr(role, name).offloaded_bytes for name in ("weights", "state", "gradients")}
    return {
        "chunks": len(role.chunks),
        "layers": config.num_layers,
        "sequence_parallel": config.sequence_parallel,
        "recompute": config.recompute_granularity,
        "multiple": role.topology.micro_batch_multiple,
        "dtype": str(config.params_dtype),
        "onloaded": onloaded,
        "offloaded": {name: getattr(role, name).offloaded_bytes for name in ("weights", "state", "gradients")},
    }


def assembled(out_dir: Path, config_name: str, overrides: tuple[str, ...]) -> dict[str, dict]:
    """Of the actor and the critic."""
    run = assemble(load_config(config_name, [*overrides, f"trainer.out_dir={out_dir}"]))
    found = {"actor": described(run.roles.actor), "critic": described(run.roles.critic)}
    run.rollouts.collector.close()
    topology.shutdown()
    return found
