"""Inputs of the rollout correction, and its formulas over plain lists."""

from math import exp, log

import torch
from hypothesis import strategies as st
from torch import Tensor

from mppo.algorithm.rollout_correction import Correction, CorrectionInputs, correct, rollout_correction_config
from mppo.batch.packed import PackedBatch
from tests.unit.samples import normals, packed_batches, segments_of


def corrected(x: CorrectionInputs, **knobs) -> Correction:
    return correct(x, rollout_correction_config(knobs))


def with_ratios(*trajectories: list[float]) -> CorrectionInputs:
    """Trajectories whose tokens are so many times as likely under the policy that is trained."""
    log_ratio = torch.tensor([log(ratio) for row in trajectories for ratio in row], dtype=torch.double)
    rollout = torch.full_like(log_ratio, -1.5)
    mask = torch.ones(len(log_ratio), dtype=torch.bool)
    return CorrectionInputs(rollout + log_ratio, rollout, mask, segments_of(*map(len, trajectories)))


@st.composite
def correction_batches(draw, **sizes: int) -> tuple[PackedBatch, CorrectionInputs]:
    """With holes in the mask and trajectories without any action."""
    batch = draw(packed_batches(**sizes))
    rollout, change = draw(normals(2, len(batch)))
    rollout = -rollout.abs()
    return batch, CorrectionInputs(rollout + 0.4 * change, rollout, batch.mask, batch.segments)


def part_of(x: CorrectionInputs, piece: PackedBatch, reduction) -> CorrectionInputs:
    origin = piece.origin
    return CorrectionInputs(x.log_probs[origin], x.rollout_log_probs[origin], x.mask[origin], piece.segments, reduction)


class Rows:
    """A batch as lists: of each trajectory that has an action, the log-probs of its actions."""

    def __init__(self, batch: PackedBatch, x: CorrectionInputs):
        def rows(values: Tensor) -> list[list[float]]:
            pieces = zip(values.split(batch.lengths), x.mask.split(batch.lengths), strict=True)
            return [row for row in (values[mask].tolist() for values, mask in pieces) if row]

        self.train, self.rollout = rows(x.log_probs), rows(x.rollout_log_probs)
        self.log_ratios = [
            [t - r for t, r in zip(*of, strict=True)] for of in zip(self.train, self.rollout, strict=True)
        ]
        self.tokens = [d for row in self.log_ratios for d in row]

    def expand(self, per_row: list[float]) -> list[float]:
        return [value for value, row in zip(per_row, self.log_ratios, strict=True) for _ in row]


def mean(x: list[float]) -> float:
    return sum(x) / max(len(x), 1)


def std(x: list[float], ddof: int = 0) -> float:
    return (sum((value - mean(x)) ** 2 for value in x) / (len(x) - ddof)) ** 0.5 if len(x) > ddof else 0.0


DIVERGENCES = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: exp(d) - 1 - d}
OVER = {"sum": sum, "mean": mean, "max": max}
OPTIONS = [f"token_{k}" for k in DIVERGENCES] + [
    f"seq_{over}_{k}" for over in OVER for k in DIVERGENCES if (over, k) != ("max", "k1")
]


def divergence_of(option: str, log_ratios: list[float]) -> list[float]:
    """Of each token of a trajectory."""
    *over, k = option.split("_")
    of_tokens = [DIVERGENCES[k](d) for d in log_ratios]
    return of_tokens if over == ["token"] else [OVER[over[1]](of_tokens)] * len(of_tokens)
