"""The share of bf16 weights that an optimizer step of RL changes: `python -m tests.bench.changed_share --json FILE`.

A small Llama is trained by `mppo train`'s own trainer (fp32 master weights, bf16 model, Adam, PPO on GRPO advantages):
first at a learning rate at which it learns, so that moments and advantages are those of a run under way, then at each
learning rate that is asked about. Before and after every refit the bits of all weights are compared. A value moves when
its master crosses the middle between two bf16 numbers, so the share grows with the learning rate over the size of the
weights: matrices here have the deviation that wide models have (about 0.03), and what is asked of is stated with it.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mppo.cli.compose import load_config
from mppo.megatron import topology
from mppo.rollout.engines.contract import RolloutEngine
from mppo.trainer.assemble import assemble
from mppo.trainer.roles import TrainableRole
from mppo.trainer.trainer import Trainer
from mppo.weights.live_weights import LiveWeights
from tests.bench.relaunch import relaunch, under_torchrun

LEARNING_RATES = (1e-6, 1e-5)
WARM_LR = 5e-6
SIZES = (
    "{hidden_size: 384, intermediate_size: 768, num_hidden_layers: 2, num_attention_heads: 6, num_key_value_heads: 6}"
)
SETTLING = 10
"""Steps at a new learning rate that do not count."""


@dataclass
class Observer:
    """Stands where a run's engine stands, and sees all weights before and after each update."""

    engine: RolloutEngine
    role: TrainableRole
    schedule: dict[int, float]
    """By number of updates: the learning rate from then on."""
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    lr: float = WARM_LR
    since: int = 0
    shares: dict[float, list[float]] = field(default_factory=dict)
    of_tensors: dict[float, list[float]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def update_weights(self, weights: LiveWeights, version: int) -> dict[str, float]:
        told = await self.engine.update_weights(weights, version)
        now = {name: tensor.detach().view(torch.int16).clone() for name, tensor in weights.tensors.items()}
        if self.before and version > self.since + SETTLING:
            changed = [(int(now[name].ne(self.before[name]).sum()), now[name].numel()) for name in now]
            share = sum(c for c, _ in changed) / sum(n for _, n in changed)
            self.shares.setdefault(self.lr, []).append(share)
            self.of_tensors.setdefault(self.lr, []).append(max(c / n for c, n in changed))
        self.before = now
        if version in self.schedule:
            self.lr, self.since = self.schedule[version], version
            set_learning_rate(self.role, self.lr)
        return told


def set_learning_rate(role: TrainableRole, lr: float) -> None:
    """From the next update on; moments and their counts go on."""
    scheduler = role.optimizer.scheduler
    scheduler.max_lr = scheduler.min_lr = lr
    for group in role.optimizer.megatron.param_groups:
        group["max_lr"] = group["min_lr"] = lr


def work(options: argparse.Namespace) -> None:
    """The only process."""
    schedule = {options.warm + i * options.steps: lr for i, lr in enumerate(LEARNING_RATES)}
    steps = options.warm + len(schedule) * options.steps
    with tempfile.TemporaryDirectory() as folder:
        run = assemble(load_config("class", overrides(steps, folder)))
        collector = run.rollouts.collector
        collector.engine = observer = Observer(collector.engine, run.roles.actor, schedule)
        Trainer(run).train()
        run.records.reporter.close()
        collector.close()
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    found = result(observer, rows, options)
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    topology.shutdown()


def overrides(steps: int, folder: str) -> list[str]:
    return [
        "parallel=single", "model.dtype=bfloat16", f"model.preset_options={SIZES}", "rollout.engine=local",
        f"actor.optim.lr={WARM_LR}", "actor.optim.adam_beta2=0.999", f"trainer.total_training_steps={steps}",
        "data.val.generator=null", "data.val.options={}", "trainer.test_freq=0", "trainer.save_hf=false",
        "data.train_batch_size=16", "actor.ppo_mini_batch_size=16", f"trainer.out_dir={folder}",
    ]  # fmt: skip


def result(observer: Observer, rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """By learning rate: the mean and the largest share of a step, that of the tensor with the most, and the rewards and
    learning rates that the run itself reported, which show that it was under way."""
    found: dict[str, Any] = {"model": SIZES, "warm_steps": options.warm, "warm_lr": WARM_LR, "of_lr": {}}
    for number, (lr, shares) in enumerate(observer.shares.items()):
        if lr == WARM_LR:
            continue
        start = options.warm + (number - 1) * options.steps
        own = rows[start + SETTLING : start + options.steps]
        assert {row["actor/lr"] for row in own} == {lr}, "the schedule did not take the learning rate"
        found["of_lr"][f"{lr:g}"] = {
            "share_mean": fmean(shares),
            "share_max": max(shares),
            "share_of_tensor_max": max(observer.of_tensors[lr]),
            "steps": len(shares),
            "grad_norm_mean": fmean(row["actor/grad_norm"] for row in own),
            "reward_mean": fmean(row["reward/mean"] for row in own),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.changed_share", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the shares")
    parser.add_argument("--warm", type=int, default=200, help=f"steps at {WARM_LR:g} before")
    parser.add_argument(
        "--steps", type=int, default=30, help=f"at each learning rate, of which the first {SETTLING} do not count"
    )
    options = parser.parse_args()
    if under_torchrun():
        work(options)
    else:
        sys.exit(relaunch("tests.bench.changed_share", 1, sys.argv[1:]))


if __name__ == "__main__":
    main()
