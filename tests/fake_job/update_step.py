"""One rank's update step of a job of 64 processes, at the width of a 70B model, on a GPU that is not there.

LD_PRELOAD=pretended_gpu.so python -m tests.fake_job.update_step FILE CASE ...

Megatron's and mppo's real code runs, forward, backward and optimizer, over fake tensors that say they are on `cuda`.
Written for each case: the times that the host waits for the device, what is held, and what the estimate says.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_job.pretended_gpu import pretend, pretend_kernels, pretend_others

pretend()

from mppo.algorithm.actor_loss import ActorTerms  # noqa: E402
from mppo.algorithm.policy_losses import policy_loss  # noqa: E402
from mppo.batch.packed import PackedBatch  # noqa: E402
from mppo.config import OptimConfig  # noqa: E402
from mppo.megatron import platform, schedule, topology  # noqa: E402

platform.prepare()

from megatron.core import parallel_state  # noqa: E402

from mppo.megatron.head import PolicyHead  # noqa: E402
from mppo.megatron.model import build_chunks  # noqa: E402
from mppo.megatron.objectives import PolicyObjective  # noqa: E402
from mppo.megatron.offload import gradients_of, optimizer_state_of, weights_of  # noqa: E402
from mppo.trainer.batches import MiniBatch  # noqa: E402
from mppo.trainer.roles import TrainableRole  # noqa: E402
from tests.distributed.measured import Kept, storage_bytes  # noqa: E402
from tests.fake_job.cases import CASES, LENGTHS, MICRO_BATCHES, PROMPT, WORLD, Case  # noqa: E402
from tests.fake_job.waits import EvenlyRouted, Waits, keep_orders_on_host  # noqa: E402


def micro_batch() -> PackedBatch:
    """As `cut_mini_batch` makes them, on the host."""
    mask = torch.cat([(torch.arange(n) >= PROMPT - 1) & (torch.arange(n) < n - 1) for n in LENGTHS])
    batch = PackedBatch.of(LENGTHS, range(len(LENGTHS)), torch.arange(sum(LENGTHS)) % 1000, mask)
    zeros = torch.zeros(len(batch))
    fields = {name: zeros for name in ("advantages", "old_log_probs", "rollout_log_probs")}
    return batch.with_fields(**fields, token_weights=zeros.double())


def outside_of_fakes(of: Callable) -> Callable:
    """What the host works out of what is on the host."""

    def with_content(*args):
        with unset_fake_temporarily():
            return of(*args)

    return with_content


def evenly_routed(waits: Waits, case: Case) -> AbstractContextManager:
    if case.model.num_experts is None:
        return nullcontext()
    rows = sum(LENGTHS) // case.parallel.tensor_model_parallel_size
    return EvenlyRouted(waits, rows * case.model.moe_topk)


def update(case: Case) -> dict:
    os.environ["RANK"] = str(case.rank)
    dist.init_process_group("fake", rank=case.rank, world_size=WORLD, store=FakeStore())
    place = topology.initialize(case.parallel, seed=1)
    pieces = [micro_batch() for _ in range(MICRO_BATCHES)]
    tokens = MICRO_BATCHES * sum(LENGTHS) * place.dp
    with FakeTensorMode(allow_non_fake_inputs=True):
        chunks = build_chunks(case.model, case.parallel, torch.bfloat16)
        keep_orders_on_host(chunks)
        role = TrainableRole(chunks, place, OptimConfig(use_distributed_optimizer=True), torch.bfloat16)
        objective = PolicyObjective(
            PolicyHead(case.model.vocab_size, 1.0, place.tp_group), ActorTerms(policy_loss("vanilla")), tokens
        )
        with role.onloaded(), Waits() as waits, evenly_routed(waits, case), Kept(weights_of(role.chunks)) as kept:
            role.update(MiniBatch(pieces, tokens), objective)
        strays = {str(x.device) for x in (*weights_of(chunks), *gradients_of(role.chunks))} - {"cuda:0"}
        found = {
            "waits": waits.found,
            "strays": sorted(strays),
            "weights": storage_bytes(weights_of(role.chunks)),
            "gradients": storage_bytes(gradients_of(role.chunks)),
            "optimizer": sum(x.numel() * x.element_size() for x in optimizer_state_of(role.optimizer.megatron)),
            "activations": kept.peak,
        }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def main(file: str, *names: str) -> None:
    pretend_kernels()
    pretend_others()
    schedule.HostWork.of = outside_of_fakes(schedule.HostWork.of)
    Path(file).write_text(json.dumps({name: update(CASES[name]) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
