"""The optimal token baseline, 2602.07078: for each token of the answer, counted from its first, the mean of the group's
rewards to go there, in proportion to the variance that each trajectory has gathered up to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS, AdvantageInputs, Advantages
from mppo.algorithm.advantages.groups import two_largest
from mppo.algorithm.advantages.tokens import rewards_to_go, run_starts, segment_cumsum
from mppo.algorithm.reduction import Reduction

ROUNDING = 1e-4
"""How far below 0 float32 may take a variance that is 0."""

BLOCK = 2**20
"""Cells (a step of a group's answers) that are summed over the ranks at a time: bounds what is held of others."""

NEEDS = {"groups": True, "sum_pi_squared": True, "reads_old_policy": True}


@dataclass(frozen=True)
class OptimalTokenBaselineConfig:
    handle_zero_tail: bool = True
    """Where the longest answer of a group is alone, beyond the second longest, its baseline is 0 (not its own reward,
    which would leave no advantage)."""


@ESTIMATORS.register("optimal_token_baseline", config=OptimalTokenBaselineConfig, **NEEDS)
def optimal_token_baseline(x: AdvantageInputs, config: OptimalTokenBaselineConfig) -> Advantages:
    """`A = G - B`; steps are tokens since the first action, so that tool output takes up steps."""
    actions, taken = (mask.bool().nonzero().squeeze(-1) for mask in (x.loss_mask, x.action_mask))
    ids = x.segments.ids
    first = torch.zeros(x.segments.count, dtype=torch.long, device=ids.device)
    first[ids[taken]] = taken[run_starts(ids[taken])]
    return _less_baseline(x, config, actions, actions - first[ids[actions]])


@ESTIMATORS.register("tir_optimal_token_baseline", config=OptimalTokenBaselineConfig, **NEEDS)
def tir_optimal_token_baseline(x: AdvantageInputs, config: OptimalTokenBaselineConfig) -> Advantages:
    """For tool-integrated reasoning: steps count actions only."""
    actions = x.loss_mask.bool().nonzero().squeeze(-1)
    order = torch.arange(len(actions), device=actions.device)
    return _less_baseline(x, config, actions, order - run_starts(x.segments.ids[actions]))


def _less_baseline(
    x: AdvantageInputs, config: OptimalTokenBaselineConfig, actions: Tensor, steps: Tensor
) -> Advantages:
    """`actions [A]` are the positions that train, `steps [A]` how far into its answer each is.

    `w = 1 - 2 pi + sum pi^2` (times rho^2 under importance weights), `W` its running sum over the answer, and
    `B(step) = sum(G W) / (sum(W) + 1e-8)` over the group.
    """
    ids = x.segments.ids[actions]
    returns = rewards_to_go(x.rewards, x.action_mask, x.segments.ids)
    to_go = returns[actions].double()
    probs, squares = x.need("old_log_probs")[actions].double().exp(), x.need("sum_pi_squared")[actions].double()
    variance = 1 - 2 * probs + squares
    # It is sum_v (1[v = y] - pi_v)^2; what is below 0 for a near-certain token is rounding.
    variance = torch.where((variance < 0) & (variance > -ROUNDING), 0.0, variance)
    if x.rollout_is_weights is not None:
        variance = variance * x.rollout_is_weights[actions].double().square()
    gathered = segment_cumsum(variance, ids)

    extent = torch.zeros(x.segments.count, dtype=torch.long, device=ids.device)
    extents = two_largest(x, extent.scatter_reduce(0, ids, steps + 1, "amax"))
    longest = extents.largest.clamp(min=0).long()
    offsets = longest.cumsum(0) - longest
    group = x.groups[ids]
    cells = offsets[group] + steps
    summed = sum_of_cells(torch.stack([to_go * gathered, gathered]), cells, int(longest.sum()), x.reduction)
    baseline = summed[0] / (summed[1] + 1e-8)
    alone = (x.per_group(x.trains) <= 1)[group]
    if config.handle_zero_tail:
        alone = alone | (steps >= extents.second[group])
    advantages = to_go - torch.where(alone, 0.0, baseline)
    return Advantages(torch.zeros_like(returns).index_copy(0, actions, advantages.to(returns.dtype)), returns)


def sum_of_cells(values: Tensor, cells: Tensor, count: int, reduction: Reduction, block: int = BLOCK) -> Tensor:
    """`[K, A] -> [K, A]`: the sum of each row over all entries, of all ranks, that share an entry's cell.

    `cells [A]` long lie in `[0, count)`, and `count` is the same on every rank. No more than `block` cells are in
    memory at a time; the ranks meet `count / block` times.
    """
    summed = torch.zeros_like(values)
    for start in range(0, count, block):
        mine = ((cells >= start) & (cells < start + block)).nonzero().squeeze(-1)
        within = cells[mine] - start
        table = values.new_zeros(len(values), min(block, count - start)).index_add(1, within, values[:, mine])
        summed[:, mine] = reduction.sum(table)[:, within]
    return summed
