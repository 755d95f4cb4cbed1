"""The hook's own cost: `python -m tests.bench.step [--layout tp2] [--json FILE]`.

An update step through mppo (policy loss, metrics, weights, optimizer) against a bare Megatron-core step of the
same model, tokens, micro-batches and optimizer, whose closure is Megatron's own cross entropy. Both take turns in one
process group; medians are compared. Megatron projects all tokens, mppo those that train: with `--prompt 1` that is all.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.policy_losses import policy_loss
from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import MicroBatchLimit
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.trajectory import Trajectory, TrajectoryId
from mppo.config import OptimConfig
from mppo.megatron import platform, topology
from mppo.megatron.attention import packed_seq_params
from mppo.megatron.head import PolicyHead
from mppo.megatron.model import build_chunks
from mppo.megatron.objectives import PolicyObjective
from mppo.trainer.batches import StepBatch, cut_mini_batch
from mppo.trainer.roles import TrainableRole
from mppo.trainer.run_spec import UpdateSettings
from mppo.weights.architectures import architecture_of
from tests.bench.relaunch import relaunch, under_torchrun
from tests.invariance.matrix import known_layouts, parallel_config, processes_of
from tests.unit.samples import table_of

# isort: split
from megatron.core.pipeline_parallel import get_forward_backward_func


@dataclass(frozen=True)
class Size:
    """The model and the batch."""

    vocab: int = 32768
    hidden: int = 384
    layers: int = 6
    trajectories: int = 16
    prompt: int = 64
    response: int = 192
    micro_batch: int = 2


def make_batch(size: Size, dp: int, dp_rank: int) -> StepBatch:
    """Trajectories of one length, an equal share for each data-parallel rank."""
    generator = torch.Generator().manual_seed(0)
    count, length = size.trajectories * dp, size.prompt + size.response
    mask = torch.arange(length) >= size.prompt
    token_ids = torch.randint(size.vocab, (count, length), generator=generator)
    rank_of = [i % dp for i in range(count)]
    mine = [i for i in range(count) if rank_of[i] == dp_rank]
    answers = [Trajectory(TrajectoryId(i, 0), token_ids[i], mask, torch.zeros(length)) for i in mine]
    table = table_of([length] * count, [size.response] * count, rank_of)
    batch = StepBatch(pack(answers, indices=mine), table, 0, WorkloadModel(linear=1.0, attention=0.0))
    noise = torch.randn(len(batch.packed), generator=generator)
    anchor = torch.full_like(noise, -10.0)
    return batch.with_fields(advantages=noise, old_log_probs=anchor)


def mppo_step(role: TrainableRole, batch: StepBatch, size: Size, head: PolicyHead) -> None:
    """What the trainer does with one mini-batch."""
    limit = MicroBatchLimit(trajectories=size.micro_batch)
    settings = UpdateSettings(len(batch.table), 1, False, limit, limit, "token-mean", 1.0)
    terms = ActorTerms(policy_loss("vanilla"))
    mini_batch = cut_mini_batch(
        batch, list(range(len(batch.table))), settings, role.topology, PolicyObjective.reads(terms)
    )
    with role.onloaded():
        role.update(mini_batch, PolicyObjective(head, terms, mini_batch.total_tokens))


def bare_step(role: TrainableRole, pieces: list[PackedBatch]) -> None:
    """Megatron-core's own training step, as its example scripts write it."""
    role.optimizer.zero_grad()
    iterators = [iter(pieces) for _ in role.chunks]
    several = len(role.chunks) > 1
    get_forward_backward_func()(
        forward_step_func=language_model_step,
        data_iterator=iterators if several else iterators[0],
        model=role.chunks if several else role.chunks[0],
        num_microbatches=len(pieces),
        seq_length=len(pieces[0]),
        micro_batch_size=1,
        forward_only=False,
    )
    role.optimizer.step()


def language_model_step(iterator, model) -> tuple[Tensor, Callable]:
    piece, device = next(iterator), platform.device()
    losses = model(
        input_ids=piece.token_ids[None].to(device),
        position_ids=piece.positions[None].to(device),
        attention_mask=None,
        labels=piece.labels[None].to(device),
        packed_seq_params=packed_seq_params(piece.lengths),
    )
    return losses, partial(cross_entropy, piece.mask.to(device))


def cross_entropy(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = (losses.float().squeeze(0) * mask).sum()
    return total, mask.sum().int(), {"lm loss": total.detach()}


def measure(size: Size, layout: str, repeats: int) -> dict[str, float]:
    """Median seconds of both steps, which take turns."""
    parallel = parallel_config(layout)
    place = topology.initialize(parallel, seed=1)
    hf = LlamaConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=4 * size.hidden, num_attention_heads=6,
        num_key_value_heads=6, num_hidden_layers=size.layers, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = architecture_of(hf).model_config(hf)
    chunks = build_chunks(model, parallel, torch.float32)
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    role = TrainableRole(chunks, place, OptimConfig(lr=1e-6), torch.float32)
    batch = make_batch(size, place.dp, place.dp_rank)
    head = PolicyHead(size.vocab, 1.0, place.tp_group)
    whole = [
        batch.packed.select(list(range(i, i + size.micro_batch))) for i in range(0, size.trajectories, size.micro_batch)
    ]
    steps = {"mppo": lambda: mppo_step(role, batch, size, head), "bare": lambda: bare_step(role, whole)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            dist.barrier()
            start = perf_counter()
            step()
            dist.barrier()
            if repeat:  # the first of each warms up
                seconds[name].append(perf_counter() - start)
                if place.rank == 0:
                    print(f"step {repeat} of {repeats}: {name} {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    return {name: median(times) for name, times in seconds.items()}


def work(options: argparse.Namespace) -> None:
    """One of the processes."""
    response = Size.prompt + Size.response - options.prompt
    size = Size(trajectories=options.trajectories, prompt=options.prompt, response=response)
    seconds = measure(size, options.layout, options.repeats)
    ratio = seconds["mppo"] / seconds["bare"]
    Console(quiet=dist.get_rank() > 0, width=120).print(
        f"{options.layout} on {dist.get_world_size()} processes: mppo {seconds['mppo']:.3f} s, bare Megatron-core"
        f" {seconds['bare']:.3f} s a step; ratio {ratio:.3f}",
        highlight=False,
    )
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps({"time_over_bare_megatron": ratio, "seconds": seconds}))
    topology.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.step", description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="dp1", choices=("dp1", *known_layouts()))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the headline ratio")
    parser.add_argument("--trajectories", type=int, default=Size.trajectories, help="of each data-parallel rank")
    parser.add_argument("--quick", action="store_true", help="another default for trajectories and repeats")
    parser.add_argument("--prompt", type=int, default=Size.prompt, help="tokens of 256 that do not train, 1 or more")
    if parser.parse_args().quick:
        parser.set_defaults(trajectories=4, repeats=2)
    options = parser.parse_args()
    if under_torchrun():
        work(options)
    else:
        processes = 1 if options.layout == "dp1" else processes_of(options.layout)
        sys.exit(relaunch("tests.bench.step", processes, sys.argv[1:]))


if __name__ == "__main__":
    main()
