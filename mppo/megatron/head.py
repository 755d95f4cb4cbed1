"""From the last hidden states to log-prob, entropy, sum of squared probabilities and exact KL, vocabulary-parallel.

The output projection is part of it: logits exist for one chunk of tokens at a time, forward and backward, never as
`[T, V/tp]`. Values and gradients equal the dense ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LastHidden:
    """What a language model's last stage gives to a closure instead of logits."""

    hidden: Tensor
    """`[A, H]`: after the last layer norm, whole on every tensor-parallel rank."""
    weight: Tensor
    """`[V/tp, H]`: this rank's rows of the output projection (of the embedding, if they are tied)."""


@dataclass(frozen=True)
class HeadOutput:
    """`[A]` each, float32 (float64 for float64 input), the same on every tensor-parallel rank."""

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor
    """No gradient."""
    full_kl: Tensor
    """KL(pi || reference) over the vocabulary; zeros without a reference."""


@dataclass(frozen=True)
class PolicyHead:
    """How hidden states become probabilities: the vocabulary, the temperature of the rollout, the TP group."""

    vocab_size: int
    """Without padding; padded rows of the weight take no part, forward or backward."""
    temperature: float
    tp_group: dist.ProcessGroup
    chunk: int = 1024
    """Tokens whose logits exist at one time."""

    def __call__(self, output: LastHidden, labels: Tensor, reference: LastHidden | None = None) -> HeadOutput:
        """`labels [A]` are ids in the whole vocabulary; `reference` is of the same A states, and gets no gradient.

        All ranks of the tensor-parallel group call alike.
        """
        reference_hidden, reference_weight = (None, None) if reference is None else (
            reference.hidden.detach(), reference.weight.detach()
        )  # fmt: skip
        return HeadOutput(*_Head.apply(output.hidden, output.weight, labels, reference_hidden, reference_weight, self))


@dataclass(frozen=True)
class _Shard:
    """This rank's columns of the vocabulary, for one chunk of tokens."""

    head: PolicyHead
    columns: int
    """Rows of the weight, padding included."""

    @property
    def start(self) -> int:
        return self.head.tp_group.rank() * self.columns

    @property
    def valid(self) -> int:
        return min(max(self.head.vocab_size - self.start, 0), self.columns)

    def chunks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.head.chunk):
            yield slice(start, min(start + self.head.chunk, count))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`[c, H] -> [c, valid]` in float32 at least, over the temperature."""
        z = hidden @ weight[: self.valid].t()
        return z.to(torch.promote_types(z.dtype, torch.float32)).div_(self.head.temperature)

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label here, and whether it is here at all."""
        local = labels - self.start
        return local.clamp(0, max(self.valid - 1, 0)), (local >= 0) & (local < self.valid)

    def reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(x, op, self.head.tp_group)
        return x

    def maxima(self, *logits: Tensor) -> Tensor:
        """`[n, c]`: the largest logit of each token over the whole vocabulary, of each of n policies."""
        if self.valid:
            local = torch.stack([z.amax(-1) for z in logits])
        else:
            local = logits[0].new_full((len(logits), len(logits[0])), -torch.inf)
        return self.reduce(local, dist.ReduceOp.MAX)


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p (log p - log q) - p + q` for each word: they add up to the KL, since p and q each add up to 1.

    Each is at least 0 and of second order in the difference, so that a KL much smaller than the rounding of a
    log-prob is still exact.
    """
    difference, p = log_p - log_q, log_p.exp()
    near = difference.abs() < 1
    small = p * (difference + torch.expm1(-torch.where(near, difference, 0.0)))
    return torch.where(near, small, p * (difference - 1) + log_q.exp())


class _Head(torch.autograd.Function):
    """Saves the hidden states and numbers per token; logits are made again for each chunk of the backward pass.

    Two all-reduces a chunk forward (maximum; sums), a third for the KL; none backward: the caller's region op adds
    the gradient of the hidden states up over the group.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, reference_hidden, reference_weight, head):
        shard, count = _Shard(head, len(weight)), len(hidden)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropy, squares, kl, normaliser, of_reference = hidden.new_zeros((6, count), dtype=dtype)
        for c in shard.chunks(count):
            z = shard.logits(hidden[c], weight)
            zs = [z] if reference_hidden is None else [z, shard.logits(reference_hidden[c], reference_weight)]
            maxima = shard.maxima(*zs)
            for logits, maximum in zip(zs, maxima, strict=True):
                logits.sub_(maximum[:, None])
            column, here = shard.own(labels[c])
            chosen = z.gather(1, column[:, None]).squeeze(1) * here if shard.valid else torch.zeros_like(maxima[0])
            e = z.exp()
            sums = [e.sum(-1), (e * z).sum(-1), chosen, e.square().sum(-1), *(q.exp().sum(-1) for q in zs[1:])]
            total, weighted, chosen, square, *reference_total = shard.reduce(torch.stack(sums))
            log_total = total.log()
            log_probs[c] = chosen - log_total
            entropy[c] = log_total - weighted / total
            squares[c] = square / total.square()
            normaliser[c] = maxima[0] + log_total
            if reference_total:
                log_reference = reference_total[0].log()
                terms = _kl_terms(z.sub_(log_total[:, None]), zs[1].sub_(log_reference[:, None]))
                kl[c] = shard.reduce(terms.sum(-1))
                of_reference[c] = maxima[1] + log_reference
        ctx.save_for_backward(
            hidden, weight, labels, reference_hidden, reference_weight, entropy, kl, normaliser, of_reference
        )
        ctx.head = head
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares, kl

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _, grad_kl):
        """`d log p_y = 1[y] - p`, `d H = -p (log p + H)`, `d KL = p (log p - log q - KL)`, over the temperature."""
        hidden, weight, labels, reference_hidden, reference_weight, entropy, kl, normaliser, of_reference = (
            ctx.saved_tensors
        )
        shard = _Shard(ctx.head, len(weight))
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for c in shard.chunks(len(hidden) if shard.valid else 0):
            log_p = shard.logits(hidden[c], weight).sub_(normaliser[c, None])
            slope = (log_p + entropy[c, None]).mul_(-grad_entropy[c, None]).sub_(grad_log_probs[c, None])
            if reference_hidden is not None:
                log_q = shard.logits(reference_hidden[c], reference_weight).sub_(of_reference[c, None])
                slope += (log_p - log_q - kl[c, None]).mul_(grad_kl[c, None])
            grad = slope.mul_(log_p.exp_())
            column, here = shard.own(labels[c])
            grad.scatter_add_(1, column[:, None], (grad_log_probs[c] * here)[:, None])
            grad = grad.div_(ctx.head.temperature).to(hidden.dtype)
            grad_hidden[c] = grad @ weight[: shard.valid]
            if grad_weight is not None:
                grad_weight[: shard.valid] += grad.t() @ hidden[c]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None
