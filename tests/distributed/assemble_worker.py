"""What a configuration is assembled to, without training.

torchrun --nproc-per-node N assemble_worker.py RESULTS CONFIG_NAME OVERRIDE...
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from megatron.core.utils import get_model_config

from mppo.cli.compose import load_config
from mppo.megatron import topology
from mppo.trainer.assemble import assemble
from mppo.trainer.roles import TrainableRole


def described(role: TrainableRole) -> dict:
    """How it is cut and recomputed, and bytes that rest in host memory during an update and after it."""
    config = get_model_config(role.chunks[0])
    with role.training():
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


def main(results: Path, config_name: str, overrides: list[str]) -> None:
    parts = assemble(load_config(config_name, [*overrides, f"trainer.out_dir={results.parent / 'out'}"]))
    found = {"actor": described(parts.actor), "critic": described(parts.critic)}
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    topology.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
