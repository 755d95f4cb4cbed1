"""Supervised steps under one layout; runs on every rank."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mppo.cli.compose import load_config
from mppo.megatron import topology as layouts
from mppo.trainer.sft import SupervisedTrainer
from mppo.weights.live_weights import LiveWeights
from tests.distributed.whole_model import whole_copy


@dataclass(frozen=True)
class Trained:
    """After a training step: its metrics, the loss of a token of all answers before and after, and the weights."""

    metrics: dict[str, float]
    losses: tuple[float, float]
    weights: dict[str, Tensor]


def supervised_steps(overrides: list[str], out_dir: Path) -> Trained:
    """One training step of four mini-batches from the initial weights."""
    trainer = SupervisedTrainer(load_config("sft", [*overrides, f"trainer.out_dir={out_dir}"]))
    batch = trainer.batch(trainer.stream.draw(80), step=0)
    trainer.stream.next_number = 0
    before = trainer.token_loss(batch)
    metrics = trainer.train_step(0)
    losses = (before, trainer.token_loss(batch))
    model = trainer.model
    live = LiveWeights.of_chunks(trainer.actor.chunks, model.architecture, model.config, trainer.topology)
    trained = Trained(metrics, losses, whole_copy(live))
    layouts.shutdown()
    return trained
