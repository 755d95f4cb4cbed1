"""Does a policy loss keep the promises that training rests on? `examine` finds out, on a small random mini-batch.

What passes here trains the same under every layout: the framework weighs, cuts and sums, and relies on the loss for no
more than this.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.algorithm.aggregation import BatchCounts, token_weights
from mppo.algorithm.parts import in_parts
from mppo.algorithm.policy_losses import MiniBatchInputs, PolicyInputs, PolicyLoss
from mppo.algorithm.reduction import WHOLE, Reduction
from mppo.algorithm.segments import Segments
from mppo.errors import ConfigError

STEP = 1e-6
"""Of the finite differences, in nats."""
TOLERANCE = 1e-5
"""How far a number may be off, relative to the largest one."""


@dataclass(frozen=True)
class Finding:
    check: str
    passed: bool
    detail: str = ""


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
    places: Tensor
    """Where each position stands in the sample it was cut from."""
    prepared: Mapping[str, Tensor]
    weights: Tensor

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
    "places",
    "weights",
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
        places=torch.arange(count),
        prepared={},
        weights=token_weights(loss.loss_agg_mode, mask, segments, counts, norm=9.0),
    )


def prepared(loss: PolicyLoss, sample: Sample, size: int, reduction: Reduction = WHOLE) -> Sample:
    """With what `prepare` finds in it, if the loss has such a step."""
    if loss.prepare is None:
        return sample
    x = MiniBatchInputs(
        log_probs=sample.log_probs,
        old_log_probs=sample.old_log_probs,
        advantages=sample.advantages,
        mask=sample.mask,
        segments=sample.segments,
        places=sample.places,
        size=size,
        seed=1,
        reduction=reduction,
    )
    return replace(sample, prepared=loss.prepared(x))


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
        **({} if stop is None else {"stop_gradient": stop}),
    )
    return torch.where(sample.mask, loss(x).loss, 0.0)


def loss_and_gradient(loss: PolicyLoss, sample: Sample) -> tuple[Tensor, Tensor]:
    """The weighted sum, and its gradient `[T]` with respect to the log-probs of the masked positions."""
    log_probs = sample.log_probs.clone().requires_grad_()
    total = (token_losses(loss, sample, log_probs) * sample.weights).sum()
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total.detach(), torch.where(sample.mask, gradient, 0.0)


def probe(loss: PolicyLoss) -> None:
    """Run a loss once on ordinary numbers, before anything is launched.

    Raises ConfigError when it raises, when it returns no `[T]` losses, or losses that are not finite.
    """
    try:
        sample = draw_sample(loss, dtype=torch.float32)
        sample = prepared(loss, sample, len(sample.mask))
        losses = token_losses(loss, sample, sample.log_probs)
    except ConfigError:
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise ConfigError(f"policy loss {loss.name!r} raised on a small batch: {raised}") from error
    broken = ~torch.isfinite(losses)
    if bool(broken.any()):
        place = int(sample.segments.ids[broken][0])
        raise ConfigError(
            f"policy loss {loss.name!r} is not finite on ordinary numbers: trajectory {place} of a small batch,"
            f" log-probs {sample.log_probs[sample.segments.ids == place].tolist()}"
        )


def examine(loss: PolicyLoss) -> list[Finding]:
    """All checks; the first that stops the others (a wrong shape, an exception) ends the list."""
    try:
        probe(loss)
    except ConfigError as error:
        return [Finding("one finite loss per token", False, str(error))]
    sample = draw_sample(loss)
    sample = prepared(loss, sample, len(sample.mask))
    findings = [Finding("one finite loss per token", True)]
    for check in (_mask, _micro_batches, _ranks, _slices, _differences, _extremes, _direction):
        try:
            findings.append(check(loss, sample))
        except Exception as error:
            findings.append(Finding(check.__doc__, False, f"{type(error).__name__}: {error}"))
    return findings


def _compare(check: Callable, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], hint: str) -> Finding:
    error = max(_relative(f, e) for f, e in zip(found, expected, strict=True))
    return Finding(check.__doc__, error < TOLERANCE, f"off by {error:.1e}" + ("" if error < TOLERANCE else f"; {hint}"))


def _relative(found: Tensor, expected: Tensor) -> float:
    error = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
    return error if error == error else float("inf")


def _mask(loss: PolicyLoss, sample: Sample) -> Finding:
    """what the mask hides matters to neither loss nor gradient"""
    hidden = ~sample.mask
    garbage = replace(
        sample,
        log_probs=torch.where(hidden, -7e5, sample.log_probs),
        old_log_probs=torch.where(hidden, 3e4, sample.old_log_probs),
        rollout_log_probs=torch.where(hidden, torch.nan, sample.rollout_log_probs),
        ref_log_probs=torch.where(hidden, torch.nan, sample.ref_log_probs),
        advantages=torch.where(hidden, torch.nan, sample.advantages),
    )
    hint = "take sequence statistics with segments.mean(x, mask), and no mean over all positions"
    return _compare(_mask, loss_and_gradient(loss, garbage), loss_and_gradient(loss, sample), hint)


def _micro_batches(loss: PolicyLoss, sample: Sample) -> Finding:
    """the cut into micro-batches does not matter"""
    pieces = [sample.trajectories(which) for which in ([0, 1, 2], [3], [4], [5, 6])]
    results = [loss_and_gradient(loss, piece) for piece in pieces]
    found = sum(total for total, _ in results), torch.cat([gradient for _, gradient in results])
    hint = "a token's loss may depend on its own trajectory only; what needs the mini-batch belongs in prepare"
    return _compare(_micro_batches, found, loss_and_gradient(loss, sample), hint)


def _ranks(loss: PolicyLoss, sample: Sample) -> Finding:
    """the cut over data-parallel ranks does not matter"""
    parts = [sample.trajectories(which) for which in ([0, 3, 4], [], [1, 2, 5, 6])] if loss.prepare else [sample]
    results = in_parts(
        parts,
        lambda part, exchange: _with_places(loss, prepared(loss, part, len(sample.mask), exchange.reduction())),
    )
    gradient = torch.zeros_like(sample.log_probs)
    for _, part_gradient, places in results:
        gradient[places] = part_gradient
    found = sum(total for total, _, _ in results), gradient
    hint = "in prepare, sum over ranks with the reduction, and draw with x.random()"
    return _compare(_ranks, found, loss_and_gradient(loss, sample), hint)


def _with_places(loss: PolicyLoss, part: Sample) -> tuple[Tensor, Tensor, Tensor]:
    return *loss_and_gradient(loss, part), part.places


def _slices(loss: PolicyLoss, sample: Sample) -> Finding:
    """slices of a trajectory on context-parallel ranks do not matter"""
    log_probs = sample.log_probs.clone().requires_grad_()
    halves = [(sample.places % 2 == side).nonzero().squeeze(-1) for side in (0, 1)]

    def on_slice(positions: Tensor, exchange) -> Tensor:
        segments = Segments(sample.segments.ids[positions], sample.segments.count, combine=exchange.sum)
        part = sample.select(positions, segments)
        return (token_losses(loss, part, log_probs[positions]) * part.weights).sum()

    total = sum(in_parts(halves, on_slice))
    (gradient,) = torch.autograd.grad(total, log_probs)
    found = total.detach(), torch.where(sample.mask, gradient, 0.0)
    hint = "take everything per trajectory through segments, nothing through positions"
    return _compare(_slices, found, loss_and_gradient(loss, sample), hint)


class _Frozen:
    """`stop_gradient` that gives back, in the order of the calls, the values of the first run."""

    def __init__(self):
        self.values: list[Tensor] = []

    def record(self, x: Tensor) -> Tensor:
        self.values.append(x.detach())
        return x.detach()

    def replay(self) -> Callable[[Tensor], Tensor]:
        values = iter(self.values)
        return lambda _: next(values)


def _differences(loss: PolicyLoss, sample: Sample) -> Finding:
    """the gradient is that of the loss (finite differences, declared stop-gradients held)"""
    frozen = _Frozen()
    token_losses(loss, sample, sample.log_probs, frozen.record)

    def total(log_probs: Tensor) -> Tensor:
        return (token_losses(loss, sample, log_probs, frozen.replay()) * sample.weights).sum()

    slopes = torch.zeros_like(sample.log_probs)
    for t in sample.mask.nonzero().squeeze(-1).tolist():
        step = torch.zeros_like(sample.log_probs)
        step[t] = STEP
        slopes[t] = (total(sample.log_probs + step) - total(sample.log_probs - step)) / (2 * STEP)
    expected, gradient = loss_and_gradient(loss, sample)
    hint = "a factor that is to be detached goes through x.stop_gradient"
    return _compare(_differences, (expected, slopes), (expected, gradient), hint)


def _extremes(loss: PolicyLoss, sample: Sample) -> Finding:
    """loss and gradient are finite at log-ratios of +-1000"""
    low, high = torch.full_like(sample.log_probs, -1000.0), torch.full_like(sample.log_probs, -1e-9)
    broken = []
    for name, log_probs, old in (("-1000", low, high), ("+1000", high, low)):
        extreme = replace(sample, log_probs=log_probs, old_log_probs=old, advantages=1e3 * sample.advantages)
        if not all(bool(torch.isfinite(x).all()) for x in loss_and_gradient(loss, extreme)):
            broken.append(name)
    hint = f"not at {', '.join(broken)}; clamp before exp, as x.log_ratio does" if broken else ""
    return Finding(_extremes.__doc__, not broken, hint)


def _direction(loss: PolicyLoss, sample: Sample) -> Finding:
    """on policy, good actions become likelier and bad ones less likely"""
    on_policy = replace(sample, old_log_probs=sample.log_probs)
    _, gradient = loss_and_gradient(loss, on_policy)
    push = -gradient * sample.advantages.sign()
    wrong, moved = int((push[sample.mask] < 0).sum()), int((push[sample.mask] > 0).sum())
    return Finding(_direction.__doc__, not wrong and moved > 0, f"{moved} tokens move, {wrong} the wrong way")
