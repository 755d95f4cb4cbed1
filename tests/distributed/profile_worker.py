"""One training step under torch's profiler; the names and counts of its ranges; runs on every rank."""

from collections import Counter
from pathlib import Path

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


def ranges_of_a_step(out_dir: Path) -> Counter[str]:
    """How often each range occurs on this rank."""
    trainer = Trainer(assemble(load_config("offset", [*SMALL, f"trainer.out_dir={out_dir}"])))
    trainer.sync_weights()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.train_step()
    trainer.run.rollouts.collector.close()
    topology.shutdown()
    return Counter(event.name for event in profiler.events())
