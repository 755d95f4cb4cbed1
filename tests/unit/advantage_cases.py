"""Every advantage estimator with the knobs it needs, and inputs for all of them."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from mppo.algorithm.advantages import AdvantageInputs, Advantages, estimator
from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.batch.packed import PackedBatch
from tests.unit.samples import assignments, normals, packed_batches, segments_of

KNOBS: dict[str, dict[str, Any]] = {"gdpo": {"gdpo_reward_keys": ["right", "brief"], "gdpo_reward_weights": [1.0, 0.5]}}
OF_TOKENS = (
    "rewards",
    "action_mask",
    "loss_mask",
    "values",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
)


def estimate(name: str, x: AdvantageInputs, **knobs: Any) -> Advantages:
    return estimator(name, knobs or KNOBS.get(name), "algorithm.adv_options")(x)


def outcomes(scores: list[float], groups: list[int], lengths: list[int] | None = None, kept=None, **others: Any):
    """Trajectories whose tokens are all actions (one each, unless lengths are given), rewarded at the last."""
    lengths = lengths or [1] * len(scores)
    rewards = torch.zeros(sum(lengths), dtype=torch.double)
    rewards[torch.tensor(lengths).cumsum(0) - 1] = torch.tensor(scores, dtype=torch.double)
    mask = torch.ones(len(rewards), dtype=torch.bool)
    masks = mask, mask if kept is None else torch.tensor(kept)
    places, count = torch.arange(len(scores)), len(scores)
    given = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in others.items()}
    groups = torch.tensor(groups)
    return AdvantageInputs(
        rewards, *masks, segments_of(*lengths), groups, int(groups.max()) + 1, places, count, **given
    )


@st.composite
def advantage_batches(draw, **sizes: int) -> tuple[PackedBatch, AdvantageInputs]:
    """Groups of uneven size, some of them empty; some actions are rejected, and some trajectories have no reward."""
    batch = draw(packed_batches(**sizes))
    count = len(batch.lengths)
    rewards, values, log_probs, squares, weights, accepted = draw(normals(6, len(batch)))
    baselines, right, brief = draw(normals(3, count))
    log_probs = -log_probs.abs()
    x = AdvantageInputs(
        rewards=torch.where(batch.mask & batch.segments.expand(brief > -0.5), rewards, 0.0),
        action_mask=batch.mask,
        loss_mask=batch.mask & (accepted > -0.7),
        segments=batch.segments,
        groups=torch.tensor(draw(assignments(count, 4)), dtype=torch.long),
        num_groups=4,
        indices=batch.indices,
        num_trajectories=count,
        values=values,
        old_log_probs=log_probs,
        sum_pi_squared=(2 * log_probs).exp() * (1 + 0.1 * squares.abs()),
        rollout_is_weights=weights.exp(),
        reward_baselines=baselines,
        reward_parts={"right": right, "brief": brief},
    )
    return batch, x


def part_of(x: AdvantageInputs, piece: PackedBatch, reduction: Reduction = WHOLE) -> AdvantageInputs:
    """The trajectories of `piece`, a selection from the batch that `x` is about."""
    tokens = {name: getattr(x, name)[piece.origin] for name in OF_TOKENS if getattr(x, name) is not None}
    rows = piece.indices
    return replace(
        x,
        **tokens,
        segments=piece.segments,
        groups=x.groups[rows],
        indices=x.indices[rows],
        reward_baselines=x.reward_baselines[rows],
        reward_parts={name: part[rows] for name, part in x.reward_parts.items()},
        reduction=reduction,
    )
