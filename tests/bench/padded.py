"""The estimators as they are commonly written over padded rows: loops over columns, groups in a dict."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.algorithm.advantages import AdvantageInputs
from tests.bench.batch import Padding

Result = tuple[Tensor, Tensor]
"""Advantages and returns, `[B, T]`; they count where the mask is 1."""


@dataclass(frozen=True)
class PaddedInputs:
    """`[B, T]` each unless stated; the longest trajectory has T positions."""

    rewards: Tensor
    mask: Tensor
    """float: 1 for actions."""
    values: Tensor
    old_log_probs: Tensor
    sum_pi_squared: Tensor
    groups: list[int]
    """B numbers."""
    reward_baselines: Tensor
    """`[B]`"""
    reward_parts: Mapping[str, Tensor]
    """`[B]` each."""

    @property
    def scores(self) -> Tensor:
        """`[B]`"""
        return self.rewards.sum(-1)


def padded_inputs(x: AdvantageInputs, padding: Padding) -> PaddedInputs:
    return PaddedInputs(
        rewards=padding.pad(x.rewards),
        mask=padding.pad(x.action_mask).float(),
        values=padding.pad(x.values),
        old_log_probs=padding.pad(x.old_log_probs),
        sum_pi_squared=padding.pad(x.sum_pi_squared),
        groups=x.groups.tolist(),
        reward_baselines=x.reward_baselines.float(),
        reward_parts=x.reward_parts,
    )


def members(groups: list[int]) -> dict[int, list[int]]:
    """Group -> its rows."""
    rows = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    return rows


def each_group(scores: Tensor, groups: list[int], fn: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
    """`[B]`: `fn(scores of the group, its rows)` at its rows; a row that is alone keeps its score."""
    result = scores.clone()
    for rows in members(groups).values():
        if len(rows) > 1:
            result[rows] = fn(scores[rows], rows)
    return result


def to_tokens(x: PaddedInputs, per_row: Tensor) -> Result:
    advantages = per_row[:, None] * x.mask
    return advantages, advantages


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum()
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / (count - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def returns_to_go(x: PaddedInputs) -> Tensor:
    """Undiscounted, `[B, T]`."""
    return (x.rewards * x.mask).flip(-1).cumsum(-1).flip(-1)


def gae(x: PaddedInputs, gamma: float, lam: float) -> Result:
    next_value = last = torch.zeros_like(x.values[:, 0])
    reversed_advantages = []
    for t in reversed(range(x.values.shape[1])):
        value, mask = x.values[:, t], x.mask[:, t]
        delta = x.rewards[:, t] + gamma * next_value - value
        next_value = value * mask + next_value * (1 - mask)
        last = (delta + gamma * lam * last) * mask + last * (1 - mask)
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return whiten(advantages, x.mask), advantages + x.values


def reinforce_plus_plus(x: PaddedInputs, gamma: float) -> Result:
    returns = torch.zeros_like(x.rewards)
    running = torch.zeros_like(x.rewards[:, 0])
    for t in reversed(range(x.rewards.shape[1])):
        mask = x.mask[:, t]
        running = (x.rewards[:, t] + gamma * running) * mask + running * (1 - mask)
        returns[:, t] = running
    return whiten(returns, x.mask), returns


def remax(x: PaddedInputs) -> Result:
    returns = returns_to_go(x)
    return returns - x.reward_baselines[:, None], returns


def group_relative(scores: Tensor, groups: list[int]) -> Tensor:
    return each_group(scores, groups, lambda s, _: (s - s.mean()) / (s.std() + 1e-6))


def grpo(x: PaddedInputs) -> Result:
    return to_tokens(x, group_relative(x.scores, x.groups))


def grpo_passk(x: PaddedInputs) -> Result:
    def lead(s: Tensor, _: list[int]) -> Tensor:
        first, second = s.topk(2).values
        return torch.zeros_like(s).index_fill(0, s.argmax(), (first - second) / (s.std() + 1e-6))

    return to_tokens(x, each_group(x.scores, x.groups, lead))


def gdpo(x: PaddedInputs, gdpo_reward_keys: list[str]) -> Result:
    summed = sum(group_relative(x.reward_parts[key], x.groups) for key in gdpo_reward_keys)
    advantages = whiten(to_tokens(x, summed)[0], x.mask)
    return advantages, advantages


def reinforce_plus_plus_baseline(x: PaddedInputs) -> Result:
    advantages, _ = to_tokens(x, each_group(x.scores, x.groups, lambda s, _: s - s.mean()))
    advantages = whiten(advantages, x.mask)
    return advantages, advantages


def rloo(x: PaddedInputs) -> Result:
    return to_tokens(x, each_group(x.scores, x.groups, lambda s, _: (s - s.mean()) * len(s) / (len(s) - 1)))


def opo(x: PaddedInputs) -> Result:
    lengths = x.mask.sum(-1)
    return to_tokens(
        x, each_group(x.scores, x.groups, lambda s, rows: s - (lengths[rows] * s).sum() / lengths[rows].sum())
    )


def gpg(x: PaddedInputs) -> Result:
    scores = x.scores
    alpha = len(scores) / (scores != 0).sum().clamp(min=1)
    return to_tokens(x, alpha * each_group(scores, x.groups, lambda s, _: s - s.mean()))


def optimal_token_baseline(x: PaddedInputs) -> Result:
    """Answers of a group share their prompt, so a column is one place in the answer."""
    returns = returns_to_go(x)
    gathered = gathered_variance(x)
    return (returns - token_baselines(x, returns, gathered, x.mask)) * x.mask, returns


def tir_optimal_token_baseline(x: PaddedInputs) -> Result:
    """Actions are first moved together to the left, then the same."""
    order = x.mask.argsort(dim=1, descending=True, stable=True)
    returns = returns_to_go(x)
    mask = x.mask.gather(1, order)
    baseline = token_baselines(x, returns.gather(1, order), gathered_variance(x).gather(1, order), mask)
    return (returns - torch.zeros_like(baseline).scatter(1, order, baseline)) * x.mask, returns


def gathered_variance(x: PaddedInputs) -> Tensor:
    variance = 1 - 2 * x.old_log_probs.exp() + x.sum_pi_squared
    return (variance * x.mask).cumsum(-1) * x.mask


def token_baselines(x: PaddedInputs, returns: Tensor, gathered: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]`: the weighted mean of a column over the group; 0 where one answer is left."""
    baseline = torch.zeros_like(returns)
    for rows in members(x.groups).values():
        weight = gathered[rows]
        column = (returns[rows] * weight).sum(0) / (weight.sum(0) + 1e-8)
        baseline[rows] = torch.where(mask[rows].sum(0) > 1, column, 0.0)
    return baseline


PADDED: dict[str, Callable[..., Result]] = {
    fn.__name__: fn
    for fn in (
        gae,
        gdpo,
        gpg,
        grpo,
        grpo_passk,
        opo,
        optimal_token_baseline,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        rloo,
        tir_optimal_token_baseline,
    )
}
"""By the name of the estimator; they take its knobs as keywords."""
