"""From the last hidden states to log-prob, entropy, sum of squared probabilities and exact KL, vocabulary-parallel.

The output projection is part of it: logits exist for one tile of tokens and words at a time, forward and backward,
never as `[T, V/tp]`. Values and gradients equal the dense ones.

A tile stays in the cache while it is worked on, so that the matrix products are what takes time: one to make the logits
forward, one to make them again backward, and the two of the gradients.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TERMS = ("log_probs", "entropy", "sum_pi_squared", "full_kl")
CPU_BLOCK, GPU_BLOCK = 1024, 8192
"""Words of a tile: a CPU's cache holds few, a GPU is idle with few."""


@dataclass(frozen=True)
class LastHidden:
    """What a language model's last stage gives to a closure instead of logits."""

    hidden: Tensor
    """`[A, H]`: after the last layer norm, whole on every tensor-parallel rank."""
    weight: Tensor
    """`[V/tp, H]`: this rank's rows of the output projection (of the embedding, if they are tied)."""


@dataclass(frozen=True)
class HeadOutput:
    """`[A]` each, float32 (float64 for float64 input), the same on every tensor-parallel rank; None: not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None
    """No gradient."""
    full_kl: Tensor | None
    """KL(pi || reference) over the vocabulary; None without a reference."""


@dataclass(frozen=True)
class PolicyHead:
    """How hidden states become probabilities: the vocabulary, the temperature of the rollout, the TP group."""

    vocab_size: int
    """Without padding; padded rows of the weight take no part, forward or backward."""
    temperature: float
    tp_group: dist.ProcessGroup
    chunk: int = 1024
    """Tokens of a tile."""
    block: int | None = None
    """Words of a tile; None: what suits the device."""
    fp32_logits: bool = False
    """Logits of 16-bit hidden states and weights are exact to float32, not rounded to 16 bits."""

    def __call__(
        self,
        output: LastHidden,
        labels: Tensor,
        reference: LastHidden | None = None,
        names: Collection[str] = TERMS,
    ) -> HeadOutput:
        """`labels [A]` are ids in the whole vocabulary; `reference` is of the same A states, and gets no gradient.

        Only terms in `names`, and log-probs, are worked out. All ranks of the tensor-parallel group call alike.
        """
        if reference is None or "full_kl" not in names:
            reference_hidden, reference_weight = None, None
        else:
            reference_hidden, reference_weight = reference.hidden.detach(), reference.weight.detach()
        found = _Head.apply(output.hidden, output.weight, labels, reference_hidden, reference_weight, self, names)
        return HeadOutput(*found)


@dataclass(frozen=True)
class _Shard:
    """This rank's columns of the vocabulary, for A tokens."""

    head: PolicyHead
    labels: Tensor
    columns: int
    """Rows of the weight, padding included."""

    @property
    def start(self) -> int:
        return self.head.tp_group.rank() * self.columns

    @property
    def valid(self) -> int:
        return min(max(self.head.vocab_size - self.start, 0), self.columns)

    def chunks(self) -> list[slice]:
        """Of the tokens."""
        return _slices(len(self.labels), self.head.chunk)

    def blocks(self) -> list[slice]:
        """Of this rank's rows of the weight."""
        return _slices(self.valid, self.head.block or (GPU_BLOCK if self.labels.is_cuda else CPU_BLOCK))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`[c, H], [v, H] -> [c, v]` in float32 at least, over the temperature."""
        if self.head.fp32_logits and hidden.dtype.itemsize < 4:
            return _product_in_float32(hidden, weight.t()).div_(self.head.temperature)
        z = torch.addmm(hidden.new_zeros(()), hidden, weight.t(), beta=0, alpha=1 / self.head.temperature)
        return _in_float32(z)

    def own(self, c: slice, v: slice) -> tuple[Tensor, Tensor]:
        """Column of each label in a tile, and whether it is there at all."""
        column = self.labels[c] - (self.start + v.start)
        width = v.stop - v.start
        return column.clamp(0, width - 1), (column >= 0) & (column < width)

    def reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(x, op, self.head.tp_group)
        return x


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True)
class _Statistics:
    """`[A]` each, over the whole vocabulary."""

    log_probs: Tensor
    normaliser: Tensor
    """log sum exp of the logits."""
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def _statistics(shard: _Shard, hidden: Tensor, weight: Tensor, names: Collection[str]) -> _Statistics:
    """Each block of words has its own maximum; blocks and ranks are then put together in the same way.

    With e = exp(z - maximum), what is added up is e, and where they are asked for e (z - maximum) and e^2.
    """
    blocks, dtype = shard.blocks(), torch.promote_types(hidden.dtype, torch.float32)
    with_entropy, with_squares = "entropy" in names, "sum_pi_squared" in names
    chosen = hidden.new_zeros(len(hidden), dtype=dtype)
    maxima = hidden.new_full((max(len(blocks), 1), len(hidden)), torch.finfo(dtype).min, dtype=dtype)
    total, weighted, squares = maxima.new_zeros(3, *maxima.shape)
    for b, v in enumerate(blocks):
        for c in shard.chunks():
            z = shard.logits(hidden[c], weight[v])
            column, here = shard.own(c, v)
            chosen[c] += torch.where(here, z.gather(1, column[:, None]).squeeze(1), 0.0)
            torch.amax(z, -1, out=maxima[b, c])
            z.sub_(maxima[b, c, None])
            e = z.exp() if with_entropy else z.exp_()
            torch.sum(e, -1, out=total[b, c])
            if with_entropy:
                torch.sum(z.mul_(e), -1, out=weighted[b, c])
            if with_squares:
                torch.sum(e.square_(), -1, out=squares[b, c])
    maximum = shard.reduce(maxima.amax(0), dist.ReduceOp.MAX)
    shift = maxima.sub_(maximum)
    scale = shift.exp()
    weighted = scale * (weighted + shift * total)
    sums = torch.stack([chosen, *(x.sum(0) for x in (scale * total, weighted, scale.square() * squares))])
    chosen, total, weighted, squares = shard.reduce(sums)
    log_total = total.log()
    return _Statistics(
        log_probs=chosen - maximum - log_total,
        normaliser=maximum + log_total,
        entropy=log_total - weighted / total if with_entropy else None,
        sum_pi_squared=squares / total.square() if with_squares else None,
    )


@dataclass(frozen=True)
class _Policy:
    """What gives the log-probs of a tile."""

    hidden: Tensor
    weight: Tensor
    normaliser: Tensor
    """`[A]`"""

    def log_probs(self, shard: _Shard, c: slice, v: slice) -> Tensor:
        return shard.logits(self.hidden[c], self.weight[v]).sub_(self.normaliser[c, None])


def _full_kl(shard: _Shard, policy: _Policy, reference: _Policy) -> Tensor:
    """`[A]`. Its terms need the normalisers, so that the logits of both are made again."""
    kl = torch.zeros_like(policy.normaliser)
    for v in shard.blocks():
        for c in shard.chunks():
            kl[c] += _kl_terms(policy.log_probs(shard, c, v), reference.log_probs(shard, c, v)).sum(-1)
    return shard.reduce(kl)


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p (log p - log q) - p + q` for each word: they add up to the KL, since p and q each add up to 1.

    Each is at least 0 and of second order in the difference, so that a KL much smaller than the rounding of a
    log-prob is still exact.
    """
    difference, p = log_p - log_q, log_p.exp()
    near = difference.abs() < 1
    small = p * (difference + torch.expm1(-torch.where(near, difference, 0.0)))
    return torch.where(near, small, p * (difference - 1) + log_q.exp())


@dataclass(frozen=True)
class _Slopes:
    """Of the loss in the logits, `1[label] chosen + p (constant + surprise log p + kl (log p - log q))`; `[A]` each.

    From `d log p_y = 1[y] - p`, `d H = -p (log p + H)`, `d KL = p (log p - log q - KL)`. None: there is no such part.
    """

    chosen: Tensor | None
    constant: Tensor
    surprise: Tensor | None
    kl: Tensor | None

    def tile(self, shard: _Shard, policy: _Policy, reference: _Policy | None, c: slice, v: slice) -> Tensor:
        """`[c, v]`"""
        x, constant = policy.log_probs(shard, c, v), self.constant[c, None]
        if self.surprise is None and self.kl is None:
            slope = x.exp_().mul_(constant)
        else:
            p = x.exp()
            slope = p.mul_(self._bracket(x, shard, reference, c, v).add_(constant))
        if self.chosen is not None:
            column, here = shard.own(c, v)
            slope.scatter_add_(1, column[:, None], torch.where(here, self.chosen[c], 0.0)[:, None])
        return slope

    def _bracket(self, log_p: Tensor, shard: _Shard, reference: _Policy | None, c: slice, v: slice) -> Tensor:
        """Without the constant; overwrites `log_p`."""
        if self.kl is None:
            return log_p.mul_(self.surprise[c, None])
        of_kl = reference.log_probs(shard, c, v).neg_().add_(log_p).mul_(self.kl[c, None])
        return of_kl if self.surprise is None else of_kl.add_(log_p.mul_(self.surprise[c, None]))


class _Head(torch.autograd.Function):
    """Saves the hidden states and numbers per token; logits are made again for each tile of the backward pass.

    Forward, two all-reduces for each policy (maxima; sums) and one for the KL; backward, none: the caller's region op
    adds the gradient of the hidden states up over the group.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, reference_hidden, reference_weight, head, names):
        shard = _Shard(head, labels, len(weight))
        of_policy = _statistics(shard, hidden, weight, names)
        full_kl = of_reference = None
        if reference_hidden is not None:
            of_reference = _statistics(shard, reference_hidden, reference_weight, ()).normaliser
            reference = _Policy(reference_hidden, reference_weight, of_reference)
            full_kl = _full_kl(shard, _Policy(hidden, weight, of_policy.normaliser), reference)
        ctx.save_for_backward(
            *(hidden, weight, of_policy.normaliser, reference_hidden, reference_weight, of_reference),
            *(labels, of_policy.entropy, full_kl),
        )
        ctx.head = head
        ctx.set_materialize_grads(False)
        if of_policy.sum_pi_squared is not None:
            ctx.mark_non_differentiable(of_policy.sum_pi_squared)
        return of_policy.log_probs, of_policy.entropy, of_policy.sum_pi_squared, full_kl

    @staticmethod
    def backward(ctx, *grads):
        hidden, weight, *others = ctx.saved_tensors
        rows = _rows_with_gradient(grads)
        if rows is None:
            grad_hidden, grad_weight = _gradients(ctx, hidden, weight, others, grads)
            return grad_hidden, grad_weight, None, None, None, None, None
        # Of the saved tensors all but the reference's weight are by token.
        chosen = [x if x is None or i == 2 else x[rows] for i, x in enumerate(others)]
        part, grad_weight = _gradients(ctx, hidden[rows], weight, chosen, [g if g is None else g[rows] for g in grads])
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, part)
        return grad_hidden, grad_weight, None, None, None, None, None


def _rows_with_gradient(grads: Collection[Tensor | None]) -> Tensor | None:
    """Numbers of the tokens with an upstream gradient: those that were clipped or have no advantage bring nothing to
    either product. None: work on all, for all have one, or their number would have to be waited for (on a GPU).

    All tensor-parallel ranks see the same gradients; and there is no collective in the backward pass.
    """
    given = [g for g in grads if g is not None]
    if not given or given[0].is_cuda:
        return None
    has_any = torch.stack([g != 0 for g in given]).any(0)
    return None if bool(has_any.all()) else has_any.nonzero().squeeze(1)


def _gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, others: list[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Of the hidden states and of the weight, from those of `[A]` log-probs, entropies and KLs."""
    normaliser, *of_reference, labels, entropy, full_kl = others
    shard, policy = _Shard(ctx.head, labels, len(weight)), _Policy(hidden, weight, normaliser)
    reference = None if of_reference[0] is None else _Policy(*of_reference)
    chosen, of_entropy, _, of_kl = (None if g is None else g / ctx.head.temperature for g in grads)
    pulls = [(chosen, 1.0), (of_entropy, entropy), (of_kl, full_kl)]
    constant = sum((-g * value for g, value in pulls if g is not None), torch.zeros_like(normaliser))
    slopes = _Slopes(chosen, constant, None if of_entropy is None else -of_entropy, of_kl)

    grad_hidden = torch.zeros_like(hidden, dtype=normaliser.dtype)
    grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    for v in shard.blocks():
        of_block = None if grad_weight is None else _in_float32(grad_weight[v])
        for c in shard.chunks():
            slope = slopes.tile(shard, policy, reference, c, v).to(hidden.dtype)
            _add_product(grad_hidden[c], slope, weight[v])
            if of_block is not None:
                _add_product(of_block, slope.t(), hidden[c])
        if of_block is not None and of_block.dtype != weight.dtype:
            grad_weight[v] = of_block
    return grad_hidden.to(hidden.dtype), grad_weight


def _in_float32(x: Tensor) -> Tensor:
    """`x` itself, or a copy if its dtype is smaller."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of 16-bit matrices. A GPU's product adds up in float32 anyway, and is told not to round (unproven)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`. The product of a 16-bit tile is rounded to 16 bits before it is added in float32."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
