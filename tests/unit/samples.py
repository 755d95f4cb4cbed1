"""Small trajectories and packed vectors, made by hand or drawn by hypothesis."""

from dataclasses import fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.trajectory import Trajectory
from mppo.trainer.batches import TrajectoryTable


def segments_of(*lengths: int) -> Segments:
    """Trajectories of these lengths, packed."""
    return Segments.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))


def trajectory(mask: list[int], *, index: int = 0, group: int = 0, **fields: Any) -> Trajectory:
    """A trajectory whose tokens and log-probs tell their place: token i of trajectory k is `100 k + i`."""
    actions = torch.tensor(mask, dtype=torch.bool)
    place = torch.arange(len(mask))
    given = {
        "tokens": 100 * index + place,
        "action_mask": actions,
        "rollout_log_probs": -(place + 1.0) * actions,
    }
    return Trajectory(index=index, group=group, **{**given, **fields})


def table_of(lengths: list[int], actions: list[int], rank_of: list[int]) -> TrajectoryTable:
    """A global batch of one answer to each prompt, whose rewards are nothing and whose actions all train."""
    count = len(lengths)
    nothing = [0.0] * count
    return TrajectoryTable(
        lengths=lengths,
        responses=actions,
        actions=actions,
        groups=list(range(count)),
        rewards=nothing,
        outcomes=nothing,
        accuracies=nothing,
        truncated=[False] * count,
        parts=[{}] * count,
        rank_of=rank_of,
        kept=actions,
    )


@st.composite
def batches(draw, max_trajectories: int = 6, max_length: int = 7) -> list[Trajectory]:
    """Trajectories with holes in their masks, some of them without any action, in groups of two."""
    masks = draw(
        st.lists(
            st.lists(st.integers(0, 1), max_size=max_length - 1).map(lambda response: [0, *response]),
            min_size=1,
            max_size=max_trajectories,
        )
    )
    rewards = draw(vectors(len(masks))).tolist()
    return [
        trajectory(mask, index=i, group=i // 2, reward=rewards[i], token_rewards=draw(vectors(len(mask))).float())
        for i, mask in enumerate(masks)
    ]


def vectors(*shape: int) -> st.SearchStrategy[Tensor]:
    """Tenths from -3 to 3 in float64, so that zeros and ties are common."""

    def fill(seed: int) -> Tensor:
        return torch.randint(-30, 31, shape, generator=torch.Generator().manual_seed(seed)).double() / 10

    return st.integers(0, 2**32 - 1).map(fill)


def normals(*shape: int) -> st.SearchStrategy[Tensor]:
    """From the normal distribution in float64: no ties, and no number on the edge of a clip."""

    def fill(seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)

    return st.integers(0, 2**32 - 1).map(fill)


def assignments(items: int, holders: int = 3) -> st.SearchStrategy[list[int]]:
    """Who of `holders` has each item; one may have nothing."""
    return st.lists(st.integers(0, holders - 1), min_size=items, max_size=items)


def held_by(assignment: list[int], holders: int = 3) -> list[list[int]]:
    """The items of each holder."""
    return [[item for item, owner in enumerate(assignment) if owner == holder] for holder in range(holders)]


def packed_batches(**sizes: int) -> st.SearchStrategy[PackedBatch]:
    return batches(**sizes).map(pack)


def with_every_field(batch: PackedBatch, hidden: int = 3) -> PackedBatch:
    """Every field that the batch did not have is drawn, the same each time; hidden states are `[T, hidden]`."""
    generator = torch.Generator().manual_seed(len(batch))

    def drawn(name: str) -> Tensor:
        shape = (len(batch), hidden) if name.endswith("hidden") else (len(batch),)
        x = torch.randn(shape, generator=generator)
        return x > 0 if name == "kept" else x.bfloat16() if name == "ref_hidden" else x

    absent = [f.name for f in fields(PackedBatch) if "per_token" in f.metadata and getattr(batch, f.name) is None]
    prepared = {"covers": drawn("kept"), "shift": drawn("shift").double()}
    return batch.with_fields(**{name: drawn(name) for name in absent if name != "origin"}, prepared=prepared)


def differing_fields(one: PackedBatch, other: PackedBatch) -> list[str]:
    """Names of what is not exactly the same in both, dtype included; where it came from (`origin`) is not compared."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and torch.equal(a, b)

    compared = ["cu_seqlens", *(f.name for f in fields(PackedBatch) if f.metadata and f.name != "origin")]
    return [name for name in compared if not same(getattr(one, name), getattr(other, name))]


def masked_sum(loss: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """How token losses become one number."""
    return (torch.where(mask, loss, 0.0) * weights).sum()
