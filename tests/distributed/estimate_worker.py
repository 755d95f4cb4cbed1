"""Measures what every rank holds and sends in one real update; runs on every rank."""

import os
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.policy_losses import policy_loss
from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import assign_ranks
from mppo.batch.packed import pack
from mppo.batch.trajectory import Trajectory, TrajectoryId
from mppo.megatron import topology as layouts
from mppo.megatron.collectives import gather_from_all
from mppo.megatron.head import LastHidden, PolicyHead
from mppo.megatron.model import build_chunks
from mppo.megatron.objectives import PolicyObjective
from mppo.megatron.offload import gradients_of, optimizer_state_of, weights_of
from mppo.megatron.topology import Topology
from mppo.trainer.batches import StepBatch, cut_mini_batch
from mppo.trainer.roles import TrainableRole
from tests.bench.head import Problem, extra_peak
from tests.distributed.estimate_cases import CASES, HEADS, PROMPT, RESPONSE, SETTINGS, TRAJECTORIES, Case, HeadCase
from tests.distributed.measured import Kept, Sent, storage_bytes
from tests.unit.samples import table_of

# isort: split
from megatron.core import parallel_state


def make_batch(case: Case, place: Topology) -> StepBatch:
    length, generator = PROMPT + RESPONSE, torch.Generator().manual_seed(0)
    mask = torch.arange(length) >= PROMPT
    token_ids = torch.randint(case.model_config.vocab_size, (TRAJECTORIES, length), generator=generator)
    rank_of = assign_ranks([list(range(TRAJECTORIES))], [1.0] * TRAJECTORIES, place.dp)
    mine = [i for i in range(TRAJECTORIES) if rank_of[i] == place.dp_rank]
    answers = [Trajectory(TrajectoryId(i, 0), token_ids[i], mask, torch.zeros(length)) for i in mine]
    packed = pack(answers, indices=mine)
    table = table_of([length] * TRAJECTORIES, [RESPONSE] * TRAJECTORIES, rank_of)
    batch = StepBatch(packed, table, 0, WorkloadModel.of(case.model_config))
    return batch.with_fields(
        advantages=torch.randn(len(packed), generator=generator), old_log_probs=torch.full((len(packed),), -6.0)
    )


def make_role(case: Case, place: Topology) -> TrainableRole:
    chunks = build_chunks(case.model_config, case.parallel, case.torch_dtype, recompute=case.recompute)
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        initialize(name, parameter.data)
    return TrainableRole(chunks, place, case.optim, case.torch_dtype)


def initialize(name: str, weight: Tensor) -> None:
    """So that experts are about equally popular, which the estimate takes them to be: what they see depends on the
    token most, and for each that likes it there is one that does not."""
    if weight.dim() == 1:
        weight.fill_(1)
    elif name.endswith("router.weight"):
        half = torch.randn(len(weight) // 2, weight.size(1))
        weight.copy_(torch.cat([half, -half]))
    else:
        weight.normal_(std=1 if "embedding" in name else 0.02)


def kinds(place: Topology) -> dict[str, str]:
    """What each group is for; a group of one rank sends nothing."""
    groups = {
        place.pp_group: "pipeline",
        parallel_state.get_expert_data_parallel_group(): "data_parallel",
        place.dp_cp_group: "data_parallel",
        place.cp_group: "context",
        place.ep_group: "experts",
        place.etp_group: "experts",
        parallel_state.get_expert_tensor_and_model_parallel_group(): "experts",
        place.tp_group: "tensor_parallel",
    }
    if place.pp > 1 and parallel_state.get_embedding_group(check_initialized=False) is not None:
        groups[parallel_state.get_embedding_group(check_initialized=False)] = "pipeline"
    return {group.group_name: kind for group, kind in groups.items()}


def measure(case: Case, place: Topology) -> dict:
    role, batch = make_role(case, place), make_batch(case, place)
    terms = ActorTerms(policy_loss("vanilla"))
    mini_batch = cut_mini_batch(batch, list(range(TRAJECTORIES)), SETTINGS, place, PolicyObjective.reads(terms))
    head = PolicyHead(case.model_config.vocab_size, 1.0, place.tp_group)
    sent, kept = Sent(kinds(place)), Kept(weights_of(role.chunks))
    with role.onloaded(), sent, kept:
        role.update(mini_batch, PolicyObjective(head, terms, mini_batch.total_tokens))
    return {
        "stage": place.pp_rank,
        "weights": storage_bytes(weights_of(role.chunks)),
        "gradients": storage_bytes(gradients_of(role.chunks)),
        "optimizer": sum(t.numel() * t.element_size() for t in optimizer_state_of(role.optimizer.megatron)),
        "activations": kept.peak,
        "sent": dict(sent.bytes),
    }


def head_peak(case: HeadCase) -> int:
    """Bytes at the highest moment, forward and backward, the gradients among them."""
    x = Problem.draw(case.tokens, case.vocabulary, case.width, getattr(torch, case.dtype), torch.device("cpu"))
    names = ["log_probs", *(name for name, wanted in vars(case.terms).items() if wanted)]
    reference = LastHidden(x.hidden.detach().clone(), x.weight) if case.terms.full_kl else None

    def run(x: Problem):
        found = x.head(LastHidden(x.hidden, x.weight), x.labels, reference, names)
        loss = sum((getattr(found, name) * x.slopes[0]).sum() for name in names)
        return torch.autograd.grad(loss, (x.hidden, x.weight))

    return extra_peak(x, run)[0] + x.weight_gradient_bytes


def measure_cases() -> dict[str, list[dict] | dict[str, int]]:
    """Of every case of this world size, what `measure` found on each rank; the peaks of `heads` on one process."""
    processes = int(os.environ["WORLD_SIZE"])
    found = {}
    for _, of_layout in groupby([c for c in CASES if c.processes == processes], key=lambda case: case.layout):
        of_layout = list(of_layout)
        place = layouts.initialize(of_layout[0].parallel, seed=1)
        for case in of_layout:
            found[case.name] = gather_from_all(measure(case, place))
        if processes == 1:
            found["heads"] = {case.name: head_peak(case) for case in HEADS}
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
