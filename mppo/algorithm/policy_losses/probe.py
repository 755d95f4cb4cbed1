"""A policy loss run once on a small random mini-batch, before anything is launched.

The sample is also what `mppo check-loss` examines a loss with (`mppo.check_loss`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.policy_losses.loss_contract import PolicyInputs, PolicyLoss
from mppo.algorithm.policy_losses.mini_batch import MiniBatchInputs
from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.segments import Segments
from mppo.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """A mini-batch of trajectories, `[T]` vectors in float64."""

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    segments: Segments
    batch_positions: Tensor
    """Where each position stands in the sample it was cut from."""
    prepared: Mapping[str, Tensor]
    token_weights: Tensor

    def select(self, positions: Tensor, segments: Segments) -> "Sample":
        """Some positions, of trajectories renumbered as in `segments`."""
        cut = {name: getattr(self, name)[positions] for name in VECTORS}
        return replace(
            self, **cut, segments=segments, prepared={name: x[positions] for name, x in self.prepared.items()}
        )

    def trajectories(self, which: list[int]) -> "Sample":
        """Some trajectories, whole, in this order; there may be none."""
        positions = [(self.segments.ids == i).nonzero().squeeze(-1) for i in which]
        lengths = torch.tensor([len(p) for p in positions], dtype=torch.long)
        segments = Segments(torch.repeat_interleave(torch.arange(len(which)), lengths), len(which))
        return self.select(torch.cat([torch.zeros(0, dtype=torch.long), *positions]), segments)


VECTORS = (
    "log_probs",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "advantages",
    "mask",
    "batch_positions",
    "token_weights",
)


def draw_sample(loss: PolicyLoss, seed: int = 0, dtype: torch.dtype = torch.double) -> Sample:
    """Seven trajectories of one to nine tokens, some tokens and one trajectory masked; ratios from 0.5 to 2 or so."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 9, 4, 2, 7, 3])
    count = int(lengths.sum())
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    old = -3 * torch.rand(count, generator=generator, dtype=torch.double) - 0.8
    log_ratio = 0.35 * torch.randn(count, generator=generator, dtype=torch.double).clamp(-2, 2)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.double)[ids]
    advantages = advantages * (0.5 + torch.rand(count, generator=generator, dtype=torch.double))
    mask = (torch.rand(count, generator=generator) < 0.8) & (ids != 4)
    segments = Segments(ids, len(lengths))
    counts = BatchCounts(int(mask.sum()), int((segments.lengths(mask) > 0).sum()))
    return Sample(
        log_probs=(old + log_ratio).to(dtype),
        old_log_probs=old.to(dtype),
        rollout_log_probs=(old - 0.1 * log_ratio).to(dtype),
        ref_log_probs=(old - 0.5 * log_ratio).to(dtype),
        advantages=advantages.to(dtype),
        mask=mask,
        segments=segments,
        batch_positions=torch.arange(count),
        prepared={},
        token_weights=token_weights(loss.loss_agg_mode, mask, segments, counts, norm=9.0),
    )


def with_prepared(loss: PolicyLoss, sample: Sample, reduction: Reduction = WHOLE) -> Sample:
    """With what `prepare` finds in it, if the loss has such a step."""
    if not loss.needs_mini_batch:
        return sample
    x = MiniBatchInputs(
        log_probs=sample.log_probs,
        old_log_probs=sample.old_log_probs,
        advantages=sample.advantages,
        mask=sample.mask,
        segments=sample.segments,
        batch_positions=sample.batch_positions,
        seed=1,
        reduction=reduction,
    )
    return replace(sample, prepared=loss.prepare(x))


def token_losses(loss: PolicyLoss, sample: Sample, log_probs: Tensor, stop: Callable | None = None) -> Tensor:
    """`[T]`, 0 outside the mask."""
    x = PolicyInputs(
        log_probs=log_probs,
        old_log_probs=sample.old_log_probs,
        advantages=sample.advantages,
        mask=sample.mask,
        segments=sample.segments,
        rollout_log_probs=sample.rollout_log_probs,
        ref_log_probs=sample.ref_log_probs,
        prepared=sample.prepared,
    )
    if stop is not None:
        x = replace(x, stop_gradient=stop)
    return torch.where(sample.mask, loss(x).loss, 0.0)


def probe(loss: PolicyLoss) -> None:
    """Run a loss once on ordinary numbers, before anything is launched.

    Raises ConfigError when it raises, when it returns no `[T]` losses, or losses that are not finite.
    """
    try:
        sample = draw_sample(loss, dtype=torch.float32)
        sample = with_prepared(loss, sample)
        losses = token_losses(loss, sample, sample.log_probs)
    except ConfigError:
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise ConfigError(f"policy loss {loss.name!r} raised on a small batch: {raised}") from error
    non_finite = ~torch.isfinite(losses)
    if bool(non_finite.any()):
        index = int(sample.segments.ids[non_finite][0])
        raise ConfigError(
            f"policy loss {loss.name!r} is not finite on ordinary numbers: trajectory {index} of a small batch,"
            f" log-probs {sample.log_probs[sample.segments.ids == index].tolist()}"
        )
