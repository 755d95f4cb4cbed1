"""Small trajectories and packed vectors, made by hand or drawn by hypothesis."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.batch.packed import CORE, PREPARED, PackedBatch, pack
from mppo.batch.table import TrajectorySummary, TrajectoryTable
from mppo.batch.trajectory import Answer, Judgement, Purpose, Status, Trajectory, TrajectoryId


def segments_of(*lengths: int) -> Segments:
    """Trajectories of these lengths, packed."""
    return Segments.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))


def trajectory(mask: list[int], index: int = 0, **fields: Any) -> Trajectory:
    """Answer number `index`, two to a prompt. Its ids and log-probs tell their position: token i is `100 index + i`."""
    actions = torch.tensor(mask, dtype=torch.bool)
    position = torch.arange(len(mask))
    given = {
        "uid": TrajectoryId(*divmod(index, 2)),
        "token_ids": 100 * index + position,
        "action_mask": actions,
        "rollout_log_probs": -(position + 1.0) * actions,
    }
    return Trajectory(**{**given, **fields})


def answer(
    mask: list[int], index: int = 0, score: float | None = 0.0, token_rewards: Tensor | None = None, **fields: Any
) -> Answer:
    """The same, judged."""
    one = trajectory(mask, index, **fields)
    return Answer(one, Judgement(one.uid, score, token_rewards=token_rewards))


def pack_answers(answers: list[Answer], indices: list[int] | None = None) -> PackedBatch:
    """Packed with their rewards."""
    return pack([a.trajectory for a in answers], [a.judgement for a in answers], indices)


def summary(uid: TrajectoryId, **fields: Any) -> TrajectorySummary:
    """Of an answer of one token to a prompt of one, worth nothing, but for what `fields` say."""
    nothing = dict(abstains=False, reward=0.0, outcome=0.0, accuracy=0.0, parts={}, oldest_version=0, mean_version=0.0)
    given = dict(length=2, actions=1, prompt_length=1, status=Status.FINISHED, purpose=Purpose.SAMPLE, source=None)
    return TrajectorySummary(uid, **{**given, **nothing, **fields})


def table_of(
    lengths: list[int], actions: list[int], rank_of: list[int], outcomes: list[float] | None = None
) -> TrajectoryTable:
    """A step of one answer to each prompt, whose actions all train."""
    outcomes = outcomes or [0.0] * len(lengths)
    sizes = zip(lengths, actions, outcomes, strict=True)
    summaries = [
        summary(TrajectoryId(i, 0), length=length, actions=count, reward=outcome, outcome=outcome)
        for i, (length, count, outcome) in enumerate(sizes)
    ]
    return TrajectoryTable(summaries, rank_of, kept=actions)


@st.composite
def batches(draw, max_trajectories: int = 6, max_length: int = 7) -> list[Answer]:
    """Answers with holes in their masks, some of them without any action, two to a prompt."""
    masks = draw(
        st.lists(
            st.lists(st.integers(0, 1), max_size=max_length - 1).map(lambda response: [0, *response]),
            min_size=1,
            max_size=max_trajectories,
        )
    )
    scores = draw(vectors(len(masks))).tolist()
    return [answer(mask, i, scores[i], draw(vectors(len(mask))).float()) for i, mask in enumerate(masks)]


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
    return batches(**sizes).map(pack_answers)


FIELDS = (
    *("rollout_log_probs", "rewards", "old_log_probs", "ref_log_probs", "values", "advantages", "returns", "kept"),
    *("rollout_is_weights", "sum_pi_squared", "full_kl", "old_hidden", "ref_hidden", "token_weights"),
    *(f"{PREPARED}/covers", f"{PREPARED}/shift"),
)
"""Of a batch that has been through a whole step, and more than one run asks for."""


def with_every_field(batch: PackedBatch, hidden: int = 3) -> PackedBatch:
    """Every field that the batch did not have is drawn, the same each time; hidden states are `[T, hidden]`."""
    generator = torch.Generator().manual_seed(len(batch))

    def drawn(name: str) -> Tensor:
        shape = (len(batch), hidden) if name.endswith("hidden") else (len(batch),)
        x = torch.randn(shape, generator=generator)
        if name in ("kept", f"{PREPARED}/covers"):
            return x > 0
        return x.bfloat16() if name == "ref_hidden" else x.double() if name == "token_weights" else x

    return batch.with_fields({name: drawn(name) for name in FIELDS if name not in batch.fields})


def differing_fields(one: PackedBatch, other: PackedBatch) -> list[str]:
    """Names of what is not exactly the same in both, dtype included; where it came from (`origin`) is not compared."""

    def vectors_of(batch: PackedBatch) -> dict[str, Tensor]:
        return {name: getattr(batch, name) for name in ("cu_seqlens", "indices", *CORE)} | batch.fields

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)

    these, those = vectors_of(one), vectors_of(other)
    return [name for name in sorted(these | those) if not same(these.get(name), those.get(name))]


def masked_sum(loss: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """How token losses become one number."""
    return (torch.where(mask, loss, 0.0) * weights).sum()
