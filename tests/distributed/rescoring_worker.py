"""Scores random trajectories as the trainer is and changed, in several layouts; runs on every rank."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from mppo.batch.trajectory import Trajectory, TrajectoryId
from mppo.cli.compose import load_config
from mppo.mismatch.hypotheses import Change, Head
from mppo.mismatch.opening import open_trainer
from mppo.mismatch.rescoring import Rescorer
from mppo.weights.sglang_layout import sglang_layout

LAYOUTS = {
    "alone": (1, ()),
    "tp2": (2, ("parallel.tensor_model_parallel_size=2",)),
    "pp2": (2, ("parallel.pipeline_model_parallel_size=2",)),
    "cp2": (2, ("parallel.context_parallel_size=2",)),
    "dp2": (2, ()),
}
CHANGES = {
    "as it is": Change(),
    "colder": Change(temperature=0.6),
    "bfloat16 head": Change(head=Head.BFLOAT16),
    "padding": Change(head=Head.PADDED),
    "embedding as head": Change(head=Head.EMBEDDING),
    "base": Change(rope_theta=5e5),
    "epsilon": Change(rms_norm_eps=1e-3),
    "again as it is": Change(temperature=1.0),
}
PARAMETERS = ("0/model.layers.1.self_attn.qkv_proj.weight", "1/lm_head.weight")


def scores(overrides: tuple[str, ...]) -> dict[str, list[Tensor]]:
    """By the names of CHANGES and of `Likelihoods`, `[L]` of each trajectory; and whole parameters of workers."""
    base = ("parallel=single", "model.preset_options={vocab_size: 70}", "data.max_response_length=40")
    trainer, _ = open_trainer(load_config("class", [*base, *overrides]))
    everything, mine = trajectories(), trainer.topology.rank
    own = everything[mine :: torch.distributed.get_world_size()]
    model = trainer.model
    target = sglang_layout(model.architecture, model.config, 2, torch.float32)
    rescorer = Rescorer(trainer, own, [t.uid for t in everything], target)
    found = {name: rescorer.score(replace(change)) for name, change in CHANGES.items()}
    found |= {"mass": (likely := rescorer.likelihoods(0.7, 9)).mass, "rank": likely.rank, "top": likely.top}
    return found | {name: [rescorer.parameter(name)] for name in PARAMETERS}


def trajectories() -> list[Trajectory]:
    draw = random.Random(0)
    return [_trajectory(number, draw.randrange(6, 40), draw) for number in range(7)]


def _trajectory(number: int, length: int, draw: random.Random) -> Trajectory:
    ids = torch.tensor([draw.randrange(70) for _ in range(length)])
    return Trajectory(TrajectoryId(number, 0), ids, torch.arange(length) >= 3, torch.zeros(length))
