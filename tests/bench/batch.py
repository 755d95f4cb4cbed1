"""A batch of realistic lengths for measurements, packed, and the same batch padded to `[B, T]`."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from mppo.algorithm.advantages import AdvantageInputs
from mppo.algorithm.aggregation import BatchCounts
from mppo.algorithm.policy_losses import MiniBatchInputs, PolicyInputs
from mppo.algorithm.segments import Segments
from mppo.batch.packed import PackedBatch, pack
from mppo.batch.trajectory import Answer, Judgement, Trajectory, TrajectoryId

GROUP_SIZE = 8
"""Answers to one prompt."""
REWARD_PARTS = ("correct", "format")
SEED = 0


@dataclass(frozen=True)
class LengthMix:
    """Log-normal lengths, in tokens."""

    median: float
    sigma: float
    cap: int

    def draw(self, generator: torch.Generator) -> int:
        length = self.median * (self.sigma * torch.randn((), generator=generator)).exp()
        return min(max(int(length), 1), self.cap)


PROMPTS = LengthMix(median=110, sigma=0.6, cap=1024)
RESPONSES = LengthMix(median=800, sigma=0.7, cap=4096)


@dataclass(frozen=True)
class BenchBatch:
    """What losses and estimators read, float32, all of the global batch on one device."""

    policy: PolicyInputs
    advantage: AdvantageInputs
    padding: "Padding"

    @property
    def tokens(self) -> int:
        return len(self.policy.mask)

    @property
    def counts(self) -> BatchCounts:
        lengths = self.policy.segments.lengths(self.policy.mask)
        return BatchCounts(loss_tokens=int(lengths.sum()), trajectories=int((lengths > 0).sum()))

    @property
    def mini_batch(self) -> MiniBatchInputs:
        """What the `prepare` of a loss is given: the whole batch is one mini-batch."""
        x = self.policy
        places = torch.arange(self.tokens, device=x.mask.device)
        return MiniBatchInputs(x.log_probs, x.old_log_probs, x.advantages, x.mask, x.segments, places, seed=SEED)


@dataclass(frozen=True)
class Padding:
    """Where the N tokens of a packed batch stand in rows as long as the longest trajectory."""

    valid: Tensor
    """`[B, T]` bool: there is a token."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Padding":
        places = torch.arange(max(lengths), device=device)
        return cls(places < torch.tensor(lengths, device=device)[:, None])

    @property
    def share(self) -> float:
        """Positions without a token over all B T positions."""
        return 1.0 - float(self.valid.double().mean())

    @cached_property
    def segments(self) -> Segments:
        """Rows as trajectories of equal length T, over `[B * T]`."""
        rows, width = self.valid.shape
        return Segments(torch.arange(rows, device=self.valid.device).repeat_interleave(width), rows)

    def pad(self, x: Tensor) -> Tensor:
        """`[N] -> [B, T]`, 0 where there is no token."""
        return torch.zeros(self.valid.shape, dtype=x.dtype, device=x.device).masked_scatter(self.valid, x)

    def unpad(self, x: Tensor) -> Tensor:
        """`[B, T]` or `[B * T]` -> `[N]`."""
        return x.view(self.valid.shape)[self.valid]

    def policy_inputs(self, x: PolicyInputs) -> PolicyInputs:
        """The same inputs as `[B * T]` vectors."""
        vectors = {f.name: v for f in fields(x) if isinstance(v := getattr(x, f.name), Tensor)}
        padded = {name: self.pad(v).flatten() for name, v in vectors.items()}
        prepared = {name: self.pad(v).flatten() for name, v in x.prepared.items()}
        return replace(x, **padded, prepared=prepared, segments=self.segments)


def draw_batch(tokens: int, device: torch.device) -> BenchBatch:
    """Whole groups until there are `tokens` positions; the same numbers at every call."""
    generator = torch.Generator().manual_seed(SEED)
    answers = draw_answers(tokens, generator)
    packed = pack([a.trajectory for a in answers], [a.judgement for a in answers]).to(device)
    policy = _policy_inputs(packed, generator)
    padding = Padding.of(packed.lengths, device)
    return BenchBatch(policy, _advantage_inputs(packed, answers, policy.old_log_probs, generator), padding)


def draw_answers(tokens: int, generator: torch.Generator) -> list[Answer]:
    """Groups that share a prompt, as many as have `tokens` tokens."""
    answers: list[Answer] = []
    total = 0
    for group in count():
        if total >= tokens and answers:
            break
        prompt = PROMPTS.draw(generator)
        for sample in range(GROUP_SIZE):
            answers.append(_answer(TrajectoryId(group, sample), prompt, generator))
            total += len(answers[-1].trajectory)
    return answers


def _answer(uid: TrajectoryId, prompt: int, generator: torch.Generator) -> Answer:
    """An outcome of two parts, and a small reward for each action as a KL penalty leaves it."""
    length = prompt + RESPONSES.draw(generator)
    mask = torch.arange(length) >= prompt
    correct, form = torch.rand(2, generator=generator).tolist()
    parts = dict(zip(REWARD_PARTS, (float(correct < 0.5), form), strict=True))
    trajectory = Trajectory(
        uid=uid,
        token_ids=torch.zeros(length, dtype=torch.long),
        action_mask=mask,
        rollout_log_probs=0.5 * torch.rand(length, generator=generator).clamp(min=1e-6).log() * mask,
    )
    judgement = Judgement(
        uid=uid,
        score=parts["correct"] + 0.5 * parts["format"],
        parts=parts,
        token_rewards=1e-3 * torch.randn(length, generator=generator) * mask,
    )
    return Answer(trajectory, judgement)


def _policy_inputs(packed: PackedBatch, generator: torch.Generator) -> PolicyInputs:
    """Log-probs about 0.1 apart, so that some tokens are clipped; one advantage per trajectory."""
    mask, segments = packed.mask, packed.segments

    def near(log_probs: Tensor, distance: float) -> Tensor:
        noise = torch.randn(len(log_probs), generator=generator).to(mask.device)
        return torch.where(mask, (log_probs + distance * noise).clamp(max=-1e-4), 0.0)

    old = near(packed["rollout_log_probs"], 0.01)
    advantages = torch.randn(segments.count, generator=generator).to(mask.device)
    return PolicyInputs(
        log_probs=near(old, 0.1),
        old_log_probs=old,
        advantages=segments.expand(advantages) * mask,
        mask=mask,
        segments=segments,
        rollout_log_probs=packed["rollout_log_probs"],
        ref_log_probs=near(old, 0.1),
    )


def _advantage_inputs(
    packed: PackedBatch, answers: list[Answer], old_log_probs: Tensor, generator: torch.Generator
) -> AdvantageInputs:
    """Everything that some estimator needs."""
    device = packed.mask.device
    values = 0.5 + 0.2 * torch.randn(len(packed), generator=generator)
    parts = {key: torch.tensor([a.judgement.parts[key] for a in answers]) for key in REWARD_PARTS}
    return AdvantageInputs(
        rewards=packed["rewards"],
        action_mask=packed.mask,
        loss_mask=packed.mask,
        segments=packed.segments,
        groups=torch.tensor([a.trajectory.group for a in answers], device=device),
        num_groups=answers[-1].trajectory.group + 1,
        indices=packed.indices,
        num_trajectories=len(answers),
        values=values.to(device) * packed.mask,
        old_log_probs=old_log_probs,
        sum_pi_squared=old_log_probs.exp().square(),
        reward_baselines=torch.rand(len(answers), generator=generator, dtype=torch.double).to(device),
        reward_parts={key: part.to(device) for key, part in parts.items()},
    )
