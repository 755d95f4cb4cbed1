"""Runs a golden case through mppo: its padded rows are packed, weighed, evaluated and unpacked as in training."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm import policy_losses as losses
from mppo.algorithm.actor_loss import ActorTerms, actor_loss
from mppo.algorithm.advantages import ESTIMATORS, AdvantageInputs
from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.kl import KLController, kl_penalty
from mppo.algorithm.policy_losses import POLICY_LOSSES, MiniBatchInputs, PolicyInputs, PolicyLoss
from mppo.algorithm.rollout_correction import CorrectionInputs, correct, rollout_correction_config
from mppo.algorithm.value_loss import clipped_value_loss
from mppo.batch.packed import pack, unpack
from mppo.batch.trajectory import Trajectory, TrajectoryId
from mppo.registry import Plugin

Rows = list[list[float]]


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    """What mppo computes for a case, under the keys of the reference's results.

    Raises ConfigError for a name that mppo does not have.
    """
    return KINDS[case["kind"]](case["name"], case["config"], case["inputs"], case.get("loss_agg_mode"))


class Packed:
    """The rows of a case, packed. A row is a prompt of one token and a response that ends at its last real token.

    The tokens are places in the padded table, so that the label of a state tells which entry it is about.
    """

    def __init__(self, response_mask: Rows, index: list[str] | None = None):
        mask = torch.tensor(response_mask).bool()
        self.shape = mask.shape
        names = index or [str(row) for row in range(len(mask))]
        groups = {name: group for group, name in enumerate(dict.fromkeys(names))}
        self.groups, self.num_groups = torch.tensor([groups[name] for name in names]), len(groups)
        self.batch = pack([self._trajectory(i, row) for i, row in enumerate(mask)])
        self.mask, self.segments = self.batch.mask, self.batch.segments
        trains = self.segments.lengths(self.mask) > 0
        self.counts = BatchCounts(int(self.mask.sum()), int(trains.sum()))

    def _trajectory(self, index: int, mask: Tensor) -> Trajectory:
        length = int(mask.nonzero().max()) + 1 if mask.any() else 0
        first = 1 + index * self.shape[1]
        return Trajectory(
            uid=TrajectoryId(index, 0),
            token_ids=torch.tensor([0, *range(first, first + length)]),
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

    def weights(self, mode: str, config: dict[str, Any]) -> Tensor:
        norm = config.get("loss_scale_factor") or self.shape[1]
        return token_weights(mode, self.mask, self.segments, self.counts, norm)

    def loss(self, token_loss: Tensor, weights: Tensor) -> Tensor:
        return (torch.where(self.mask, token_loss, 0.0) * weights).sum()

    def with_gradient(self, loss: Tensor, leaf: Tensor) -> dict[str, Any]:
        (gradient,) = torch.autograd.grad(loss, leaf)
        return {"loss": loss.item(), "grad": self.rows(gradient)}


RENAMED = {"dppo_tv": {"clip_ratio_c": "ratio_cap"}, "dppo_kl": {"clip_ratio_c": "ratio_cap"}}
"""Knobs that have another name in mppo: DPPO's cap is not the dual clip."""


def knobs(plugin: Plugin, config: dict[str, Any]) -> dict[str, Any]:
    """Those of the case that the plugin reads: a case lists the knobs of all."""
    renamed = RENAMED.get(plugin.name, {})
    read = {f.name for f in fields(plugin.config)}
    return {renamed.get(k, k): v for k, v in config.items() if renamed.get(k, k) in read}


def optional(packed: Packed, inputs: dict, name: str) -> Tensor | None:
    return packed.states(inputs[name]) if inputs.get(name) is not None else None


def policy_inputs(packed: Packed, loss: PolicyLoss, inputs: dict, log_probs: Tensor) -> PolicyInputs:
    """What training gives to the loss: the whole case is one mini-batch on one rank."""
    x = PolicyInputs(
        log_probs=log_probs,
        old_log_probs=packed.states(inputs["old_log_prob"]),
        advantages=packed.states(inputs["advantages"]),
        mask=packed.mask,
        segments=packed.segments,
        rollout_is_weights=optional(packed, inputs, "rollout_is_weights"),
        ref_log_probs=optional(packed, inputs, "ref_log_prob"),
    )
    if not loss.needs_mini_batch:
        return x
    mini_batch = MiniBatchInputs(
        log_probs=log_probs.detach(),
        old_log_probs=x.old_log_probs,
        advantages=x.advantages,
        mask=x.mask,
        segments=x.segments,
        batch_positions=torch.arange(len(packed.batch)),
        seed=0,
    )
    return replace(x, prepared=loss.prepare(mini_batch))


def evaluate_terms(packed: Packed, terms: ActorTerms, inputs: dict, mode: str, config: dict) -> dict[str, Any]:
    log_probs = packed.states(inputs["log_prob"]).requires_grad_()
    x = policy_inputs(packed, terms.policy_loss, inputs, log_probs)
    weights = packed.weights(mode, config)
    token_loss, statistics = actor_loss(x, weights, terms, optional(packed, inputs, "entropy"))
    metrics = {f"actor/{name}": ratio.value for name, ratio in statistics.items()}
    return {**packed.with_gradient(packed.loss(token_loss, weights), log_probs), "metrics": metrics}


def policy_loss(name: str, config: dict, inputs: dict, mode: str) -> dict[str, Any]:
    loss = losses.policy_loss(name, knobs(POLICY_LOSSES.get(name), config))
    return evaluate_terms(Packed(inputs["response_mask"]), ActorTerms(loss), inputs, mode, config)


def actor_loss_case(name: str, config: dict, inputs: dict, mode: str) -> dict[str, Any]:
    terms = ActorTerms(
        policy_loss=losses.policy_loss(name, knobs(POLICY_LOSSES.get(name), config)),
        entropy_coeff=config["entropy_coeff"],
        kl_loss_coef=config["kl_loss_coef"] if config["use_kl_loss"] else None,
        kl_loss_type=config.get("kl_loss_type") or "k1",
    )
    result = evaluate_terms(Packed(inputs["response_mask"]), terms, inputs, mode, config)
    return {"loss": result["loss"], "grad": result["grad"]}


def value_loss(name: str, config: dict, inputs: dict, mode: str) -> dict[str, Any]:
    packed = Packed(inputs["response_mask"])
    values = packed.states(inputs["vpreds"]).requires_grad_()
    old_values, returns = packed.states(inputs["values"]), packed.states(inputs["returns"])
    token_loss, statistics = clipped_value_loss(values, old_values, returns, config["cliprange_value"])
    clipfrac = statistics["vf_clipfrac"].reduce(packed.mask).value
    return {**packed.with_gradient(packed.loss(token_loss, packed.weights(mode, config)), values), "clipfrac": clipfrac}


def aggregate(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    packed = Packed(inputs["response_mask"])
    return {"loss": packed.loss(packed.states(inputs["loss"]), packed.weights(name, config)).item()}


def advantage(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    plugin = ESTIMATORS.get(name)
    packed = Packed(inputs["response_mask"], inputs["index"])
    baselines = inputs.get("reward_baselines")
    x = AdvantageInputs(
        rewards=packed.states(inputs["token_level_rewards"]),
        action_mask=packed.mask,
        loss_mask=packed.mask,
        segments=packed.segments,
        groups=packed.groups,
        num_groups=packed.num_groups,
        indices=packed.batch.indices,
        num_trajectories=len(packed.batch.indices),
        values=optional(packed, inputs, "values"),
        old_log_probs=optional(packed, inputs, "old_log_probs"),
        sum_pi_squared=optional(packed, inputs, "sum_pi_squared"),
        rollout_is_weights=optional(packed, inputs, "rollout_is_weights"),
        reward_baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.double),
    )
    result = plugin.bind(knobs(plugin, config), "config")(x)
    return {"advantages": packed.rows(result.advantages), "returns": packed.rows(result.returns)}


def rollout_correction(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    packed = Packed(inputs["response_mask"])
    given = {key: value for key, value in config.items() if value is not None}
    x = CorrectionInputs(
        log_probs=packed.states(inputs["old_log_prob"]),
        rollout_log_probs=packed.states(inputs["rollout_log_prob"]),
        mask=packed.mask,
        segments=packed.segments,
    )
    result = correct(x, rollout_correction_config(given))
    weights = None if result.importance_weights is None else packed.rows(result.importance_weights)
    return {"weights": weights, "mask": packed.rows(result.kept.double()), "metrics": result.metrics}


def kl(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    packed = Packed([[1.0] * len(row) for row in inputs["log_prob"]])
    log_probs = packed.states(inputs["log_prob"]).requires_grad_()
    value = kl_penalty(log_probs, packed.states(inputs["ref_log_prob"]), name)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    return {"value": packed.rows(value.detach()), "grad": packed.rows(gradient)}


def kl_controller(name: str, config: dict, inputs: dict, mode: None) -> dict[str, Any]:
    targets = {"fixed": None, "adaptive": config["target_kl"]}
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
    "actor_loss": actor_loss_case,
    "rollout_correction": rollout_correction,
}
