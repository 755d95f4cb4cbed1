"""Measures cases of one layout against the truth, or makes the truth on one process; runs on every rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.policy_losses import policy_loss
from mppo.algorithm.statistics import add_up
from mppo.batch.balance import WorkloadModel
from mppo.batch.batch_plan import assign_ranks
from mppo.batch.packed import pack
from mppo.config import ModelSource, OptimConfig
from mppo.megatron import topology as layouts
from mppo.megatron.collectives import (
    data_parallel_reduction,
    gather_from_all,
    reduce_statistics,
    sum_with_gradient,
)
from mppo.megatron.head import PolicyHead
from mppo.megatron.model import build_chunks
from mppo.megatron.objectives import LogProbPass, PolicyObjective, ValueObjective, ValuePass
from mppo.megatron.schedule import run_schedule
from mppo.megatron.topology import Topology
from mppo.trainer.batches import MiniBatch, StepBatch, cut_mini_batch
from mppo.trainer.current_policy_fields import with_prepared
from mppo.trainer.roles import TrainableRole
from mppo.trainer.run_spec import UpdateSettings
from mppo.weights.live_weights import LiveWeights, local_parameters
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel, open_model
from tests.distributed.dense_reference import NORM, random_batch
from tests.distributed.hook_worker import Gradients, trajectories
from tests.distributed.model_folders import VOCABULARY
from tests.distributed.whole_model import whole_copy
from tests.invariance.matrix import CUTS, FOLDERS, KNOBS, Case, parallel_config
from tests.unit.samples import table_of

LR = 1e-2


@dataclass(frozen=True)
class Truth:
    """What one process found: fields of the batch that are near its outputs, and for each case loss and gradient."""

    fields: dict[str, Tensor]
    """`[T]` each, of the whole batch."""
    metrics: dict[str, dict[str, float]]
    gradients: dict[str, dict[str, Tensor]]
    """By case and Hugging Face name."""
    stepped: dict[str, dict[str, Tensor]]
    """Parameters after one optimizer step, for some cases."""


class Bench:
    """Actor or critic under one layout, and the batch."""

    def __init__(self, name: str, spec: dict[str, Any], topology: Topology, distributed_optimizer: bool = False):
        self.critic, self.topology = name.startswith("critic"), topology
        folder = str(Path(spec["models"]) / FOLDERS[name])
        source = ModelSource(path=folder, dtype=spec["dtype"], make_vocab_size_divisible_by=8)
        self.model: PretrainedModel = open_model(source, seed=1)
        self.parallel = parallel_config(spec["layout"])
        self.mirror = self._chunks()
        """Holds what gradients and parameters are compared with, cut as the model is."""
        optim = OptimConfig(lr=LR, adam_eps=1e-2, use_distributed_optimizer=distributed_optimizer)
        chunks = self._chunks()
        self._load(chunks, self.model.source)
        self.role = TrainableRole(chunks, topology, optim, self.model.dtype)
        self.reduction = data_parallel_reduction(topology)
        self.head = PolicyHead(VOCABULARY, 0.9, topology.tp_group, chunk=7)
        self.dense = random_batch(VOCABULARY)

    def _chunks(self):
        return build_chunks(self.model.config, self.parallel, self.model.dtype, value_head=self.critic)

    def _load(self, chunks, source) -> None:
        model = self.model
        load(chunks, model.architecture, model.config, source, self.topology,
             value_head=self.critic, zero_value_head=False)  # fmt: skip

    def batch(self, idle: bool) -> StepBatch:
        """This rank's part; with `idle`, the trajectories that train are all on the first rank."""
        everything = trajectories(self.dense)
        lengths, actions = [len(t) for t in everything], [t.action_count for t in everything]
        rank_of = assign_ranks([list(range(len(everything)))], [float(n) for n in lengths], self.topology.dp)
        if idle:
            rank_of = [0 if n else self.topology.dp - 1 for n in actions]
        table = table_of(lengths, actions, rank_of)
        mine = [i for i, rank in enumerate(rank_of) if rank == self.topology.dp_rank]
        packed = pack([everything[i] for i in mine], indices=mine)
        return StepBatch(packed, table, step=0, workload=WorkloadModel(linear=1.0, attention=0.0))

    def outputs(self) -> dict[str, Tensor]:
        """`[T]` log-probs or values of the whole batch, on one process."""
        closure = ValuePass() if self.critic else LogProbPass(self.head)
        return self.role.forward(self.batch(False), CUTS["one"], closure)

    def with_fields(self, batch: StepBatch, fields: dict[str, Tensor]) -> StepBatch:
        """The made-up fields of this rank's trajectories, with some tokens rejected."""
        starts, start = {}, 0
        for index, length in enumerate(batch.table.lengths):
            starts[index] = start
            start += length
        places = [torch.arange(starts[i], starts[i] + batch.table.lengths[i]) for i in batch.packed.indices.tolist()]
        places = torch.cat([torch.zeros(0, dtype=torch.long), *places])
        mine = {name: x[places] for name, x in fields.items()}
        kept = batch.packed.mask & mine.pop("keeps")
        return batch.with_fields(**mine).keeping(kept, self.reduction)

    def run(self, case: Case, fields: dict[str, Tensor]) -> dict[str, float]:
        """Forward and backward of the whole mini-batch; returns its metrics, gradients stay in the buffers."""
        settings = UpdateSettings(100, 1, False, CUTS[case.cut], CUTS[case.cut], case.mode, NORM, "kept")
        batch = self.with_fields(self.batch(case.cut == "idle"), fields)
        indices = list(range(len(batch.table)))
        loss = None if self.critic else policy_loss(case.loss, KNOBS.get(case.loss))
        if loss is not None and loss.needs_mini_batch:
            batch = with_prepared(loss, batch, indices, batch.packed["rollout_log_probs"], 1, self.reduction)
        mini_batch = cut_mini_batch(batch, indices, settings, self.topology, self._reads(loss))
        self.role.optimizer.zero_grad()
        statistics = run_schedule(self.role.chunks, mini_batch.micro_batches, self._objective(loss, mini_batch))
        metrics = reduce_statistics(add_up(statistics), self.topology)
        return {name: ratio.value for name, ratio in metrics.items()}

    @staticmethod
    def _terms(loss) -> ActorTerms:
        return ActorTerms(loss, entropy_coeff=0.1, kl_loss_coef=0.05, importance_weighted=("policy", "kl"))

    def _reads(self, loss) -> tuple[str, ...]:
        return ValueObjective.reads if self.critic else PolicyObjective.reads(self._terms(loss))

    def _objective(self, loss, mini_batch: MiniBatch):
        if self.critic:
            return ValueObjective(0.2, mini_batch.total_tokens)
        combine = sum_with_gradient(self.topology.cp_group) if self.topology.cp > 1 else None
        return PolicyObjective(self.head, self._terms(loss), mini_batch.total_tokens, combine=combine)

    def gather(self, what: str) -> dict[str, Tensor]:
        """Gradients or parameters under their Hugging Face names, on one process."""
        pairs = zip(self._parameters(self.mirror), self._parameters(self.role.chunks), strict=True)
        for mirrored, own in pairs:
            mirrored.data.copy_(own.main_grad if what == "gradients" else own.data)
        weights = LiveWeights.of_chunks(self.mirror, self.model.architecture, self.model.config, self.topology,
                                        value_head=self.critic)  # fmt: skip
        return whole_copy(weights)

    def _parameters(self, chunks) -> list[Tensor]:
        return [p.tensor for p in local_parameters(chunks, self.model.architecture, self.critic)]

    def error(self, what: str, expected: dict[str, Tensor], relative_to: dict[str, Tensor]) -> float:
        """Largest difference to this rank's part of `expected`, over the largest entry of `relative_to`."""
        self._load(self.mirror, Gradients(expected))
        scale = max(x.abs().max().item() for x in relative_to.values())
        pairs = zip(self._parameters(self.mirror), self._parameters(self.role.chunks), strict=True)
        differences = [
            ((own.main_grad if what == "gradients" else own.data).float() - mirrored.data.float()).abs().max().item()
            for mirrored, own in pairs
        ]
        return max(differences) / scale


def make_fields(bench: Bench) -> dict[str, Tensor]:
    """Near enough to the model's outputs that some tokens are clipped and some are not."""
    outputs, batch = bench.outputs(), bench.batch(False).packed
    generator = torch.Generator().manual_seed(3)

    def noise() -> Tensor:
        return torch.randn(len(batch), generator=generator)

    keeps = torch.rand(len(batch), generator=generator) < 0.85
    if bench.critic:
        values = outputs["values"]
        return {"values": values + 0.3 * noise(), "returns": values + noise(), "keeps": keeps}
    log_probs = outputs["log_probs"]
    return {
        "rollout_log_probs": log_probs,  # exactly the current ones: what prepare is given
        "old_log_probs": log_probs + 0.4 * noise(),
        "ref_log_probs": log_probs + 0.4 * noise(),
        "advantages": noise(),
        "rollout_is_weights": torch.rand(len(batch), generator=generator) + 0.5,
        "keeps": keeps,
    }


def make_truth(spec: dict[str, Any], topology: Topology) -> None:
    """One process: every loss and mode that the cases need."""
    found: dict[str, Truth] = {}
    cases = [Case(**case) for case in spec["cases"]]
    for model in dict.fromkeys(case.model for case in cases):
        mine = {case.truth: case for case in cases if case.model == model}
        bench = Bench(model, spec, topology)
        truth = Truth(make_fields(bench), {}, {}, {})
        for name, case in mine.items():
            truth.metrics[name] = bench.run(case, truth.fields)
            truth.gradients[name] = bench.gather("gradients")
            if f"{case.loss}/{case.mode}" in spec["steps"]:
                stepper = Bench(model, spec, topology)  # whose optimizer has no memory of other cases
                stepper.run(case, truth.fields)
                stepper.role.optimizer.step()
                truth.stepped[name] = stepper.gather("parameters")
        found[model] = truth
    torch.save(found, spec["truth"])


def measure(spec: dict[str, Any], topology: Topology) -> dict[str, dict[str, float]]:
    """The errors of every case, the worst over all ranks."""
    truths: dict[str, Truth] = torch.load(spec["truth"], weights_only=False)
    models = dict.fromkeys(Case(**case).model for case in spec["cases"])
    benches = {model: Bench(model, spec, topology) for model in models}

    errors = {}
    for case in (Case(**case) for case in spec["cases"]):
        truth = truths[case.model]
        mine = compare(benches[case.model], case, truth)
        if f"{case.loss}/{case.mode}" in spec["steps"]:
            mine["step"] = compare_step(Bench(case.model, spec, topology, topology.dp > 1), case, truth)
        everyone = gather_from_all(mine)
        errors[case.name] = {key: max(rank[key] for rank in everyone if key in rank) for key in mine}
    return errors


def compare(bench: Bench, case: Case, truth: Truth) -> dict[str, float]:
    """Gradients relative to the largest entry of the model's, metrics to themselves or 0.1: signed tokens cancel."""
    metrics = bench.run(case, truth.fields)
    expected = truth.metrics[case.truth]
    assert metrics.keys() == expected.keys(), (metrics.keys(), expected.keys())
    scale = {name: max(abs(value), 0.1) for name, value in expected.items()}
    return {
        "metrics": max(abs(metrics[name] - value) / scale[name] for name, value in expected.items()),
        "gradient": bench.error("gradients", truth.gradients[case.truth], truth.gradients[case.truth]),
    }


def compare_step(bench: Bench, case: Case, truth: Truth) -> float:
    """Parameters after the first step of an optimizer, relative to the largest of them."""
    bench.run(case, truth.fields)
    bench.role.optimizer.step()
    stepped = truth.stepped[case.truth]
    return bench.error("parameters", stepped, stepped)


def work_on(spec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The errors of each case; none of the truth itself. `spec` has layout, cases, models, truth, steps and dtype."""
    topology = layouts.initialize(parallel_config(spec["layout"]), seed=1)
    if spec["layout"] == "dp1":
        make_truth(spec, topology)
        errors = {}
    else:
        errors = measure(spec, topology)
    layouts.shutdown()
    return errors
