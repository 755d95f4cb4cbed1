"""Does a policy loss keep the promises that training rests on? `examine` finds out, on a small random mini-batch.

What passes here trains the same under every layout: the framework multiplies by token weights, cuts and sums, and
relies on the loss for no more than this.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mppo.algorithm.policy_losses import PolicyLoss
from mppo.algorithm.policy_losses.probe import Sample, draw_sample, probe, token_losses, with_prepared
from mppo.algorithm.reduction import Reduction
from mppo.algorithm.segments import Segments
from mppo.check_loss.simulated_ranks import on_simulated_ranks
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


def loss_and_gradient(loss: PolicyLoss, sample: Sample) -> tuple[Tensor, Tensor]:
    """The weighted sum, and its gradient `[T]` with respect to the log-probs of the masked positions."""
    log_probs = sample.log_probs.clone().requires_grad_()
    total = (token_losses(loss, sample, log_probs) * sample.token_weights).sum()
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total.detach(), torch.where(sample.mask, gradient, 0.0)


def examine(loss: PolicyLoss) -> list[Finding]:
    """All checks; the first that stops the others (a wrong shape, an exception) ends the list."""
    try:
        probe(loss)
    except ConfigError as error:
        return [Finding("one finite loss per token", False, str(error))]
    sample = draw_sample(loss)
    sample = with_prepared(loss, sample)
    findings = [Finding("one finite loss per token", True)]
    for check in (_mask, _micro_batches, _ranks, _slices, _differences, _extremes, _direction):
        try:
            findings.append(check(loss, sample))
        except Exception as error:
            findings.append(Finding(_promise(check), False, f"{type(error).__name__}: {error}"))
    return findings


def _compare(check: Callable, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], hint: str) -> Finding:
    error = max(_relative(f, e) for f, e in zip(found, expected, strict=True))
    return Finding(
        _promise(check), error < TOLERANCE, f"off by {error:.1e}" + ("" if error < TOLERANCE else f"; {hint}")
    )


def _promise(check: Callable) -> str:
    return check.__doc__ or check.__name__


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
    found = torch.stack([total for total, _ in results]).sum(), torch.cat([gradient for _, gradient in results])
    hint = "a token's loss may depend on its own trajectory only; what needs the mini-batch belongs in prepare"
    return _compare(_micro_batches, found, loss_and_gradient(loss, sample), hint)


def _ranks(loss: PolicyLoss, sample: Sample) -> Finding:
    """the cut over data-parallel ranks does not matter"""
    held = [sample.trajectories(which) for which in ([0, 3, 4], [], [1, 2, 5, 6])]
    results = on_simulated_ranks(
        held,
        lambda part, reduction: _with_positions(loss, with_prepared(loss, part, reduction)),
    )
    gradient = torch.zeros_like(sample.log_probs)
    for _, part_gradient, positions in results:
        gradient[positions] = part_gradient
    found = torch.stack([total for total, _, _ in results]).sum(), gradient
    hint = "in prepare, sum over ranks with the reduction, and draw with x.random()"
    return _compare(_ranks, found, loss_and_gradient(loss, sample), hint)


def _with_positions(loss: PolicyLoss, part: Sample) -> tuple[Tensor, Tensor, Tensor]:
    return *loss_and_gradient(loss, part), part.batch_positions


def _slices(loss: PolicyLoss, sample: Sample) -> Finding:
    """slices of a trajectory on context-parallel ranks do not matter"""
    log_probs = sample.log_probs.clone().requires_grad_()
    halves = [(sample.batch_positions % 2 == side).nonzero().squeeze(-1) for side in (0, 1)]

    def on_slice(positions: Tensor, reduction: Reduction) -> Tensor:
        segments = Segments(sample.segments.ids[positions], sample.segments.count, combine=reduction.sum)
        part = sample.select(positions, segments)
        return (token_losses(loss, part, log_probs[positions]) * part.token_weights).sum()

    total = torch.stack(on_simulated_ranks(halves, on_slice)).sum()
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
        return (token_losses(loss, sample, log_probs, frozen.replay()) * sample.token_weights).sum()

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
    return Finding(_promise(_extremes), not broken, hint)


def _direction(loss: PolicyLoss, sample: Sample) -> Finding:
    """on policy, good actions become likelier and bad ones less likely"""
    on_policy = replace(sample, old_log_probs=sample.log_probs)
    _, gradient = loss_and_gradient(loss, on_policy)
    push = -gradient * sample.advantages.sign()
    wrong, moved = int((push[sample.mask] < 0).sum()), int((push[sample.mask] > 0).sum())
    return Finding(_promise(_direction), not wrong and moved > 0, f"{moved} tokens move, {wrong} the wrong way")
