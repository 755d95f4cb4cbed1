"""The same answers in many orders of arrival, from one, two or four producing ranks, and one update with each."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mppo.batch.trajectory import Answer, Judgement, Span, Status, Trajectory, TrajectoryId, Turn
from mppo.cli.compose import load_config
from mppo.megatron import topology as layouts
from mppo.rollout.buffer import Buffer, Group
from mppo.rollout.prompt_reader import Prompt
from mppo.trainer.assemble import assemble, build_actor
from mppo.trainer.reporter import SilentReporter
from mppo.trainer.run import Run
from mppo.trainer.trainer import Trainer
from mppo.weights.live_weights import LiveWeights
from tests.distributed.whole_model import whole_copy

GROUP_SIZES = (4, 1, 3, 5, 4, 2, 6, 3)
"""Samples of each prompt: groups may have any size."""
PRODUCERS = (1, 2, 4)


@dataclass(frozen=True)
class Arrival:
    """Who generated which group, and in which order each rank's groups were put into the buffer."""

    producer_of: dict[int, int]
    """Rank by number of the prompt."""
    order: list[int]

    @classmethod
    def drawn(cls, number: int, ranks: int) -> "Arrival":
        """The `number`th, from 1, 2, 4, ... of `ranks` ranks in turn."""
        draw = random.Random(number)
        sizes = [count for count in PRODUCERS if count <= ranks]
        producers = draw.sample(range(ranks), sizes[number % len(sizes)])
        prompts = list(range(len(GROUP_SIZES)))
        draw.shuffle(prompts)
        return cls({prompt: draw.choice(producers) for prompt in prompts}, prompts)


@dataclass(frozen=True)
class Updated:
    """The actor after one training step, on rank 0; whole Hugging Face tensors."""

    tensors: dict[str, Tensor]

    def differing_bits(self, other: "Updated") -> int:
        """Bits in which two sets of weights differ."""
        assert self.tensors.keys() == other.tensors.keys()
        return sum(_differing_bits(x, other.tensors[name]) for name, x in self.tensors.items())

    def largest_error(self, other: "Updated") -> float:
        """Largest difference of a weight, over the largest weight of the other model."""
        assert self.tensors.keys() == other.tensors.keys()
        difference = max((x - other.tensors[name]).abs().max().item() for name, x in self.tensors.items())
        return difference / max(x.abs().max().item() for x in other.tensors.values())


def _differing_bits(one: Tensor, other: Tensor) -> int:
    changed = one.contiguous().view(torch.uint8) ^ other.contiguous().view(torch.uint8)
    return sum(int(((changed >> bit) & 1).sum()) for bit in range(8))


def group(number: int, vocab_size: int) -> Group:
    """Made-up answers to a prompt, the same on every rank: of several lengths, some with tool output, some in two
    parts, one aborted and one that no reward judged."""
    generator = torch.Generator().manual_seed(number)
    draw = random.Random(number)
    answers = []
    for sample in range(GROUP_SIZES[number]):
        for part in range(2 if (number + sample) % 5 == 0 else 1):
            length, prompt = draw.randint(6, 24), draw.randint(1, 4)
            mask = torch.rand(length, generator=generator) < 0.8
            mask[:prompt], mask[-1] = False, True
            uid = TrajectoryId(number, sample, part)
            trajectory = Trajectory(
                uid=uid,
                token_ids=torch.randint(0, vocab_size, (length,), generator=generator),
                action_mask=mask,
                rollout_log_probs=torch.where(mask, -4.0 - torch.rand(length, generator=generator), 0.0),
                spans=(Span(prompt, length, 0),),
                turns=(Turn(prompt, length),),
                status=Status.ABORTED if (number, sample) == (3, 2) else Status.FINISHED,
            )
            score = None if (number, sample) == (5, 1) else float(draw.randint(0, 3))
            answers.append(Answer(trajectory, Judgement(uid, score)))
    return Group(number, Prompt("", (0,), None), tuple(answers))


def updates(layout: list[str], arrivals: list[Arrival | None], out_dir: Path) -> list[Updated]:
    """The weights after one step with each arrival (None: those before), always from the same; runs on every rank."""
    overrides = [
        *layout,
        f"trainer.out_dir={out_dir}",
        "trainer.save_hf=false",
        f"data.train_batch_size={len(GROUP_SIZES)}",
        "actor.ppo_mini_batch_size=1",
        "rollout.n=8",
        "actor.ppo_epochs=2",
        "actor.shuffle=true",
        "actor.ppo_micro_batch_size_per_gpu=3",
        "actor.entropy_coeff=0.01",
        "actor.optim.lr=1e-2",
        "actor.optim.adam_eps=1e-2",  # or Adam's quotient would make much of gradients that are rounding alone
        "algorithm.rollout_correction.rollout_is=token",
        "reward.workers=0",
    ]
    run = assemble(load_config("class", overrides))
    found = [_updated(run, arrival) for arrival in arrivals]
    run.rollouts.collector.close()
    layouts.shutdown()
    return found


def _updated(run: Run, arrival: Arrival | None) -> Updated:
    """One training step from fresh weights and a fresh optimizer."""
    roles = replace(run.roles, actor=build_actor(run.spec, run.model, run.topology))
    if arrival is not None:
        _step(replace(run, roles=roles, records=replace(run.records, reporter=SilentReporter())), arrival)
    weights = LiveWeights.of_chunks(roles.actor.chunks, run.model.architecture, run.model.config, run.topology)
    return Updated(whole_copy(weights))


def _step(run: Run, arrival: Arrival) -> None:
    buffer = Buffer(run.rollouts.buffer.gather)
    for number in arrival.order:
        if arrival.producer_of[number] == run.topology.rank:
            buffer.put(group(number, run.model.config.vocab_size))
    trainer = Trainer(run)
    batch = trainer.balance(trainer.reward(buffer.take(len(GROUP_SIZES))))
    batch = trainer.advantages(trainer.old_log_probs(batch))
    trainer.update_actor(batch)
