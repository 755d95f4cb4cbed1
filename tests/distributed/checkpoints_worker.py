"""Saves roles in one setting, loads them in others, and makes the next update in both."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.config import ModelSource, OptimConfig
from mppo.megatron import topology as layouts
from mppo.megatron.model import build_chunks
from mppo.trainer.roles import TrainableRole
from mppo.weights.live_weights import LiveWeights
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel, open_model
from tests.distributed.checkpoint_cases import CASES, LAYOUTS, Case, Setting
from tests.distributed.whole_model import whole_copy


def opened(case: Case) -> PretrainedModel:
    preset = "char-moe" if case.model == "experts" else "char"
    options = {"num_hidden_layers": 4, "tie_word_embeddings": case.model == "tied"}
    return open_model(
        ModelSource(preset=preset, preset_options=options, dtype=case.dtype, make_vocab_size_divisible_by=8), seed=1
    )


class Trial:
    """A role in a setting, whose gradients follow from its weights, so that all that is loaded shows in an update."""

    def __init__(self, case: Case, setting: Setting):
        parallel = LAYOUTS[setting.layout]
        place, model, critic = layouts.initialize(parallel, seed=1), opened(case), case.model == "critic"
        chunks = build_chunks(model.config, parallel, model.dtype, value_head=critic)
        load(chunks, model.architecture, model.config, model.source, place, value_head=critic)
        optim = OptimConfig(lr=1e-2, lr_warmup_steps=4, clip_grad=0.5, use_distributed_optimizer=setting.distributed)
        self.role = TrainableRole(chunks, place, optim, model.dtype)
        self.live = LiveWeights.of_chunks(self.role.chunks, model.architecture, model.config, place, value_head=critic)

    def spoil(self) -> None:
        """So that a weight that is not loaded shows."""
        for chunk in self.role.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(torch.nan)

    def update(self, number: int) -> float:
        """One optimizer step; returns the norm of the gradient."""
        self.role.optimizer.zero_grad()
        for chunk in self.role.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for parameter in buffer.params:
                    gradient = parameter.detach().float() * (number + 1) / buffer.data_parallel_group.size()
                    parameter.main_grad.copy_(gradient)
            chunk.finish_grad_sync()
        return self.role.optimizer.step()["grad_norm"]

    def two_updates(self, number: int) -> list[float]:
        return [self.update(number), self.update(number + 1)]

    def weights(self) -> dict[str, Tensor]:
        return whole_copy(self.live)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names on one side only, and names of tensors that differ in any entry."""
    unequal = {name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])}
    return sorted(unequal | found.keys() ^ expected.keys())


@dataclass(frozen=True)
class Saved:
    """What an uninterrupted run has: the weights that were saved, and what follows."""

    weights: dict[str, Tensor]
    norms: list[float]
    """Of the gradients of two more updates; that of the second depends on moments and fp32 weights too."""
    next_weights: dict[str, Tensor]


def save(case: Case, folder: Path) -> Saved:
    trial = Trial(case, case.source)
    for number in range(case.steps):
        trial.update(number)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    trial.role.save(folder)
    weights, norms = trial.weights(), trial.two_updates(case.steps)
    return Saved(weights, norms, trial.weights())


def reload(case: Case, target: Setting, folder: Path, saved: Saved) -> dict[str, list[str] | float]:
    """How the role that is loaded differs from the one that went on."""
    trial = Trial(case, target)
    trial.spoil()
    trial.role.load(folder)
    unequal = differences(trial.weights(), saved.weights)
    norms, after = trial.two_updates(case.steps), trial.weights()
    norm_errors = [abs(found - expected) / expected for found, expected in zip(norms, saved.norms, strict=True)]
    largest = max(
        (after[n].float() - expected.float()).abs().max().item() for n, expected in saved.next_weights.items()
    )
    return {"unequal": unequal, "norm": max(norm_errors), "next": largest}


@contextmanager
def process_groups(store: Path) -> Iterator[None]:
    """Of their own for each layout, or the threads of gloo would pile up."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    yield
    dist.barrier()
    layouts.shutdown()


def save_and_reload(folder: Path) -> dict[str, dict]:
    """What `reload` finds of every case and target."""
    saved, found = {}, {}
    for layout in LAYOUTS:
        with process_groups(folder / f"save-{layout}"):
            for number, case in enumerate(CASES):
                if case.source.layout == layout:
                    saved[number] = save(case, folder / str(number))
    for layout in LAYOUTS:
        with process_groups(folder / f"load-{layout}"):
            for number, case in enumerate(CASES):
                for target in case.targets:
                    if target.layout == layout:
                        found[case.name(target)] = reload(case, target, folder / str(number), saved[number])
    return found
