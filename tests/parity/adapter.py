"""Runs a golden case through mppo: its padded rows are packed, weighed, evaluated and unpacked as in training."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm.advantages import ESTIMATORS, AdvantageInputs
from mppo.algorithm.aggregation import AGGREGATIONS, BatchCounts, token_weights
from mppo.algorithm.kl import KL_FORMS, KLController, kl_penalty
from mppo.algorithm.policy_losses import POLICY_LOSSES, PolicyInputs, TokenLosses
from mppo.algorithm.value_loss import clipped_value_loss
from mppo.batch.packed import pack, unpack
from mppo.batch.trajectory import Trajectory
from mppo.registry import Plugin, Registry

Rows = list[list[float]]


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    """What mppo computes for a case, under the keys of the reference's results.

    Raises NotImplementedError for a kind, or a name within a kind, that mppo lacks.
    """
    if case["kind"] not in KINDS:
        raise NotImplementedError(f"kind {case['kind']}")
    return KINDS[case["kind"]](case["name"], case["config"], case["inputs"], case.get("loss_agg_mode"))


class Packed:
    """The rows of a case, packed. A row is a prompt of one token and a response that ends at its last real token.

    The tokens are places in the padded table, so that the label of a state tells which entry it is about.
    """

    def __init__(self, response_mask: Rows, index: list[str] | None = None):
        mask = torch.tensor(response_mask).bool()
        self.shape = mask.shape
        groups = {name: group for group, name in enumerate(dict.fromkeys(index or []))}
        self.num_groups = len(groups)
        self.batch = pack([self._trajectory(i, row, groups[index[i]] if index else i) for i, row in enumerate(mask)])
        self.mask, self.segments = self.batch.mask, self.batch.segments
        trains = self.segments.lengths(self.mask) > 0
        self.counts = BatchCounts(int(self.mask.sum()), int(trains.sum()))

    def _trajectory(self, index: int, mask: Tensor, group: int) -> Trajectory:
        length = int(mask.nonzero().max()) + 1 if mask.any() else 0
        first = 1 + index * self.shape[1]
        return Trajectory(
            index=index,
            group=group,
            tokens=torch.tensor([0, *range(first, first + length)]),
            action_mask=torch.cat([mask.new_zeros(1), mask[:length]]),
            rollout_log_probs=torch.zeros(1 + length),
        )

    def states(self, rows: Rows) -> Tensor:
        """`[B, T]` padded -> `[T]` packed, float64; 0 at the last state of a trajectory, which has no action."""
        table = torch.tensor(rows, dtype=torch.double).flatten()
        return torch.cat([table.new_zeros(1), table])[self.batch.labels]

    def rows(self, states: Tensor) -> Rows:
        """`[T]` packed -> `[B, T]` padded with 0."""
        padded = states.new_zeros(self.shape)
        for row, tokens in zip(padded, unpack(self.batch, states), strict=True):
            row[: len(tokens) - 1] = tokens[1:]
        return padded.tolist()

    def loss(self, token_loss: Tensor, mode: str, config: dict[str, Any]) -> Tensor:
        norm = config.get("loss_scale_factor", self.shape[1])
        weights = token_weights(mode, self.mask, self.segments, self.counts, norm)
        return (torch.where(self.mask, token_loss, 0.0) * weights).sum()

    def with_gradient(self, loss: Tensor, leaf: Tensor) -> dict[str, Any]:
        (gradient,) = torch.autograd.grad(loss, leaf)
        return {"loss": loss.item(), "grad": self.rows(gradient)}


def find(registry: Registry, name: str) -> Plugin:
    if name not in registry.names():
        raise NotImplementedError(f"{registry.kind} {name!r}")
    return registry.get(name)


def bound(plugin: Plugin, config: dict[str, Any]) -> Callable:
    """The plugin with those knobs of the case that it reads: a case lists the knobs of all."""
    read = {f.name for f in fields(plugin.config)}
    return plugin.bind({name: value for name, value in config.items() if name in read}, "config")


def policy_losses(packed: Packed, name: str, config: dict, inputs: dict, log_probs: Tensor) -> TokenLosses:
    plugin = find(POLICY_LOSSES, name)
    if "rollout_is_weights" in inputs:
        raise NotImplementedError("rollout importance weights")
    x = PolicyInputs(
        log_probs=log_probs,
        old_log_probs=packed.states(inputs["old_log_prob"]),
        advantages=packed.states(inputs["advantages"]),
        mask=packed.mask,
        segments=packed.segments,
    )
    return bound(plugin, config)(x)


def policy_loss(name: str, config: dict, inputs: dict, mode: str) -> dict[str, Any]:
    packed = Packed(inputs["response_mask"])
    log_probs = packed.states(inputs["log_prob"]).requires_grad_()
    result = policy_losses(packed, name, config, inputs, log_probs)
    metrics = {f"actor/{key}": s.reduce(packed.mask).value for key, s in result.statistics.items()}
    return {**packed.with_gradient(packed.loss(result.loss, mode, config), log_probs), "metrics": metrics}


def actor_loss(name: str, config: dict, inputs: dict, mode: str) -> dict[str, Any]:
    packed = Packed(inputs["response_mask"])
    log_probs = packed.states(inputs["log_prob"]).requires_grad_()
    token_loss = policy_losses(packed, name, config, inputs, log_probs).loss
    token_loss = token_loss - config["entropy_coeff"] * packed.states(inputs["entropy"])
    if config["use_kl_loss"]:
        find(KL_FORMS, config["kl_loss_type"].removesuffix("+"))
        kl = kl_penalty(log_probs, packed.states(inputs["ref_log_prob"]), config["kl_loss_type"])
        token_loss = token_loss + config["kl_loss_coef"] * kl
    return packed.with_gradient(packed.loss(token_loss, mode, config), log_probs)


def value_loss(name: str, config: dict, inputs: dict, mode: str) -> dict[str, Any]:
    if name != "clipped":
        raise NotImplementedError(f"value loss {name!r}")
    packed = Packed(inputs["response_mask"])
    values = packed.states(inputs["vpreds"]).requires_grad_()
    old_values, returns = packed.states(inputs["values"]), packed.states(inputs["returns"])
    token_loss, statistics = clipped_value_loss(values, old_values, returns, config["cliprange_value"])
    clipfrac = statistics["vf_clipfrac"].reduce(packed.mask).value
    return {**packed.with_gradient(packed.loss(token_loss, mode, config), values), "clipfrac": clipfrac}


def aggregate(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    find(AGGREGATIONS, name)
    packed = Packed(inputs["response_mask"])
    return {"loss": packed.loss(packed.states(inputs["loss"]), name, config).item()}


def advantage(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    plugin = find(ESTIMATORS, name)
    packed = Packed(inputs["response_mask"], inputs["index"])
    x = AdvantageInputs(
        rewards=packed.states(inputs["token_level_rewards"]),
        mask=packed.mask,
        segments=packed.segments,
        groups=packed.batch.groups,
        num_groups=packed.num_groups,
        values=packed.states(inputs["values"]) if "values" in inputs else None,
    )
    result = bound(plugin, config)(x)
    return {"advantages": packed.rows(result.advantages), "returns": packed.rows(result.returns)}


def kl(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    find(KL_FORMS, name.removesuffix("+"))
    packed = Packed([[1.0] * len(row) for row in inputs["log_prob"]])
    log_probs = packed.states(inputs["log_prob"]).requires_grad_()
    value = kl_penalty(log_probs, packed.states(inputs["ref_log_prob"]), name)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    return {"value": packed.rows(value.detach()), "grad": packed.rows(gradient)}


def kl_controller(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    targets = {"fixed": None, "adaptive": config["target_kl"]}
    if name not in targets:
        raise NotImplementedError(f"KL controller {name!r}")
    controller = KLController(config["kl_coef"], targets[name], config["horizon"])
    coefficients = [controller.coefficient]
    for current_kl, trajectories in inputs["updates"]:
        controller.update(current_kl, trajectories)
        coefficients.append(controller.coefficient)
    return {"coefficients": coefficients}


KINDS = {
    "policy_loss": policy_loss,
    "aggregate": aggregate,
    "advantage": advantage,
    "kl": kl,
    "kl_controller": kl_controller,
    "value_loss": value_loss,
    "actor_loss": actor_loss,
}
