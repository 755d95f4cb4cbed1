"""Measures how far the hook is from the dense reference; runs on every rank."""

import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from mppo.algorithm.actor_loss import ActorTerms
from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.policy_losses import policy_loss
from mppo.algorithm.statistics import add_up
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.trajectory import Trajectory, TrajectoryId
from mppo.config import ModelSource, OptimConfig
from mppo.megatron import topology as layouts
from mppo.megatron.collectives import (
    data_parallel_reduction,
    gather_from_all,
    join_slices,
    reduce_statistics,
    sum_with_gradient,
)
from mppo.megatron.head import PolicyHead
from mppo.megatron.model import build_chunks, wrap_for_training
from mppo.megatron.objectives import LogProbPass, PolicyObjective, ValueObjective, ValuePass
from mppo.megatron.optimizer import Optimizer
from mppo.megatron.router import take_balance_loss
from mppo.megatron.schedule import run_schedule
from mppo.megatron.topology import Topology
from mppo.trainer.batches import context_part
from mppo.weights.fused import on_disk
from mppo.weights.live_weights import local_parameters
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel, open_model
from tests.distributed.dense_reference import (
    CLIP,
    DUAL_CLIP,
    ENTROPY_COEFF,
    KL_COEFF,
    NORM,
    VALUE_CLIP,
    DenseBatch,
    aggregate,
    balance_loss,
    hidden_states,
    log_probs_and_entropy,
    policy_losses,
    random_batch,
    value_losses,
)
from tests.distributed.hook_cases import CASES, Case
from tests.distributed.model_folders import REWARD_MODELS, VOCABULARY

GARBAGE = 1e3
"""Stands in every field where the mask hides it."""


class Gradients:
    """A TensorSource of gradients by Hugging Face name, so that the loader cuts them as it cuts the weights."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors

    @classmethod
    def of(cls, reference: torch.nn.Module) -> "Gradients":
        return cls(on_disk((name, parameter.grad) for name, parameter in reference.named_parameters()))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.tensors[name].narrow(dim, start, stop - start)

    def largest(self, names: Iterable[str]) -> float:
        """The largest entry of the gradients of these parameters."""
        return largest(self.tensors[name].abs().max().item() for name in names)


def largest(values: Iterable[float]) -> float:
    """NaN when one of them is."""
    return torch.tensor(list(values)).max().item()


def sum_over_world(x: Tensor) -> float:
    whole = x.clone()
    dist.all_reduce(whole)
    return whole.item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest entry."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


class Comparison:
    """One case: the same weights and batch, on the hook and on the dense reference."""

    def __init__(self, case: Case, topology: Topology, models: Path):
        self.case, self.topology = case, topology
        self.reduction = data_parallel_reduction(topology)
        self.critic = case.model in REWARD_MODELS
        folder = str(models / case.model)
        source = ModelSource(
            path=folder,
            dtype="float32",
            make_vocab_size_divisible_by=case.vocabulary_multiple,
            moe_aux_loss_coeff=case.aux_loss_coeff,
        )
        self.model: PretrainedModel = open_model(source, seed=1)
        self.chunks = build_chunks(self.model.config, case.parallel, self.model.dtype, value_head=self.critic)
        self._load(self.chunks, self.model.source)
        auto = AutoModelForSequenceClassification if self.critic else AutoModelForCausalLM
        self.reference = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.dense = random_batch(VOCABULARY)
        self.router_logits: list[Tensor] = []
        for module in self.reference.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                module.register_forward_hook(lambda _, __, output: self.router_logits.append(output[0]))

    def errors(self) -> dict[str, float]:
        outputs = self._reference_outputs()
        fields = self._made_up_fields(outputs)
        token_losses = self._reference_losses(outputs, fields)
        loss = self._aggregate(token_losses["vf_loss" if self.critic else "loss"])
        if self.case.aux_loss_coeff:
            loss = loss + self.case.aux_loss_coeff * self._balance_loss()
        loss.backward()
        batch = self._packed(fields)
        return self._output_errors(batch, outputs) | self._training_errors(batch, token_losses)

    def _load(self, chunks, source) -> None:
        model = self.model
        load(
            chunks,
            model.architecture,
            model.config,
            source,
            self.topology,
            value_head=self.critic,
            zero_value_head=False,
        )

    # The reference

    def _reference_outputs(self) -> dict[str, Tensor]:
        hidden = hidden_states(self.reference.model, self.dense)
        if self.critic:
            return {"values": self.reference.score(hidden).squeeze(-1)}
        logits = self.reference.lm_head(hidden)
        log_probs, entropy = log_probs_and_entropy(logits, self.dense, self.case.temperature)
        return {"log_probs": log_probs, "entropy": entropy}

    def _made_up_fields(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Near enough to the current model that some tokens are clipped and some are not."""
        noise = self.dense.noise
        if self.critic:
            values = outputs["values"].detach()
            return {"values": values + 0.3 * noise["values"], "returns": values + noise["returns"]}
        log_probs = outputs["log_probs"].detach()
        return {
            "old_log_probs": log_probs + 0.6 * noise["old_log_probs"],
            "ref_log_probs": log_probs + 0.4 * noise["ref_log_probs"],
            "advantages": noise["advantages"],
        }

    def _reference_losses(self, outputs: dict[str, Tensor], fields: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.critic:
            return value_losses(outputs["values"], fields["values"], fields["returns"])
        return policy_losses(**outputs, **fields)

    def _aggregate(self, token_losses: Tensor) -> Tensor:
        return aggregate(token_losses, self.dense.mask, self.case.mode)

    def _balance_loss(self) -> Tensor:
        pieces = [piece for of_rank in self.case.parts for piece in of_rank if piece]
        return balance_loss(self.router_logits, self.dense, pieces, self.model.config.moe_topk)

    # The hook

    def _packed(self, fields: dict[str, Tensor]) -> PackedBatch:
        batch = pack(trajectories(self.dense))
        mask = self.dense.mask
        counts = BatchCounts(int(mask.sum()), int(mask.any(-1).sum()))
        return batch.with_fields(
            token_weights=token_weights(self.case.mode, batch.mask, batch.segments, counts, NORM),
            **{name: packed(torch.where(mask, x, GARBAGE), self.dense) for name, x in fields.items()},
        )

    def _micro_batches(self, batch: PackedBatch) -> list[PackedBatch]:
        mine = self.case.parts[self.topology.dp_rank]
        return [context_part(batch.select(which), self.topology) for which in mine]

    @property
    def _head(self) -> PolicyHead:
        return PolicyHead(VOCABULARY, self.case.temperature, self.topology.tp_group, chunk=3)

    def _objective(self, batch: PackedBatch):
        tokens = batch.real_tokens
        if self.critic:
            return ValueObjective(VALUE_CLIP, tokens)
        vanilla = policy_loss("vanilla", {"clip_ratio": CLIP, "clip_ratio_c": DUAL_CLIP})
        terms = ActorTerms(vanilla, entropy_coeff=ENTROPY_COEFF, kl_loss_coef=KL_COEFF)
        combine = sum_with_gradient(self.topology.cp_group) if self.topology.cp > 1 else None
        return PolicyObjective(self._head, terms, tokens, combine=combine)

    def _output_errors(self, batch: PackedBatch, expected: dict[str, Tensor]) -> dict[str, float]:
        pieces = self._micro_batches(batch)
        closure = ValuePass() if self.critic else LogProbPass(self._head, ("log_probs", "entropy"))
        outputs = run_schedule(self.chunks, pieces, closure, forward_only=True)
        if not self.topology.is_last_stage:
            return {}
        errors = {}
        for name, dense in expected.items():
            found = batch.gather_back([o["origin"] for o in outputs], [o[name] for o in outputs])
            found = self.reduction.sum(join_slices(found, self.topology))
            errors[name] = relative_error(found[batch.mask], packed(dense.detach(), self.dense)[batch.mask])
        return errors

    def _training_errors(self, batch: PackedBatch, token_losses: dict[str, Tensor]) -> dict[str, float]:
        chunks = wrap_for_training(self.chunks, OptimConfig())
        for chunk in chunks:
            chunk.zero_grad_buffer()
        statistics = run_schedule(chunks, self._micro_batches(batch), self._objective(batch))
        metrics = reduce_statistics(add_up(statistics), self.topology)
        role = "critic" if self.critic else "actor"
        errors = self._gradient_errors(chunks) | {
            name: self._loss_error(metrics[f"{role}/{name}"].value, expected) for name, expected in token_losses.items()
        }
        if self.case.aux_loss_coeff:
            balance, found = self._balance_loss().item(), sum_over_world(take_balance_loss(chunks)) / batch.real_tokens
            errors["balance_loss"] = abs(found / self.case.aux_loss_coeff - balance) / balance
        norm = Optimizer(chunks, OptimConfig(use_distributed_optimizer=False), self.model.dtype).step()["grad_norm"]
        expected = torch.cat([p.grad.flatten() for p in self.reference.parameters()]).double().norm().item()
        return errors | {"grad_norm": abs(norm - expected) / expected}

    def _loss_error(self, found: float, token_losses: Tensor) -> float:
        """Relative to the sum of the sizes of the token losses: they have both signs and may cancel."""
        return (abs(found - self._aggregate(token_losses)) / self._aggregate(token_losses.abs())).item()

    def _gradient_errors(self, chunks) -> dict[str, float]:
        """Every rank compares every parameter it holds: cut, replicated and padded ones alike."""
        expected = Gradients.of(self.reference)
        self._load(chunks, expected)
        of_model = expected.largest(expected.names())
        errors = []
        for local in local_parameters(chunks, self.model.architecture, self.critic):
            difference = (local.tensor.main_grad - local.tensor.data).abs().max().item()
            of_tensor = expected.largest(local.hf_names) or of_model  # 0: an expert that no token went to
            errors.append((difference / of_model, difference / of_tensor))
        by_model, by_tensor = zip(*errors, strict=True)
        return {"gradient": largest(by_model), "gradient_by_tensor": largest(by_tensor)}


def trajectories(dense: DenseBatch) -> list[Trajectory]:
    """Column t of the dense mask is about token t+1; nothing decides about token 0."""
    found = []
    for i, length in enumerate(dense.lengths.tolist()):
        action_mask = torch.zeros(length, dtype=torch.bool)
        action_mask[1:] = dense.mask[i, : length - 1]
        found.append(Trajectory(TrajectoryId(i, 0), dense.tokens[i, :length], action_mask, torch.zeros(length)))
    return found


def packed(values: Tensor, dense: DenseBatch) -> Tensor:
    """`[B, L-1] -> [T]`; the last position of a trajectory, which predicts nothing, gets 0."""
    rows = zip(values, dense.lengths.tolist(), strict=True)
    return torch.cat([torch.cat([row[: length - 1], row.new_zeros(1)]) for row, length in rows])


def worst(errors: list[dict[str, float]]) -> dict[str, float]:
    """Over all ranks."""
    names = {name for rank in errors for name in rank}
    return {name: largest(rank[name] for rank in errors if name in rank) for name in sorted(names)}


def measure_cases(models: Path) -> dict[str, dict[str, float]]:
    """The errors of every case of this world size, the worst over all ranks."""
    processes = int(os.environ["WORLD_SIZE"])
    cases = [case for case in CASES if case.processes == processes]
    found = {}
    for _, of_layout in groupby(cases, key=lambda case: case.layout):
        of_layout = list(of_layout)
        topology = layouts.initialize(of_layout[0].parallel, seed=1)
        for case in of_layout:
            found[case.name] = worst(gather_from_all(Comparison(case, topology, models).errors()))
        layouts.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
