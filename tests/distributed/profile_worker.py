"""One training step under torch's profiler; writes the names and counts of its ranges.

torchrun --nproc-per-node N profile_worker.py RESULTS OUT_DIR
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mppo.cli.compose import load_config
from mppo.megatron import topology
from mppo.trainer.assemble import assemble
from mppo.trainer.trainer import Trainer

SMALL = [
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=2",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_micro_batch_size_per_gpu=2",
]


def main(results: Path, out_dir: str) -> None:
    trainer = Trainer(assemble(load_config("offset", [*SMALL, f"trainer.out_dir={out_dir}"])))
    trainer.sync_weights(0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.train_step(0)
    if torch.distributed.get_rank() == 0:
        results.write_text(json.dumps(Counter(event.name for event in profiler.events())))
    topology.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
