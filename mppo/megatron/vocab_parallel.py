"""Log-probs and entropy of vocabulary-parallel logits: values and gradients equal the dense ones."""

import torch
import torch.distributed as dist
from torch import Tensor


class _LogProbsAndEntropy(torch.autograd.Function):
    """Saves the shifted logits once, `[T, V/tp]` in float32 (float64 for float64 input), and nothing else of that size.

    Two all-reduces forward (maximum; three sums at once), none backward.
    """

    @staticmethod
    def forward(ctx, logits, labels, temperature, valid, start, group):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        z = logits[:, :valid].to(dtype) / temperature
        maximum = z.amax(-1) if valid else z.new_full((len(z),), -torch.inf)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        z = z.sub_(maximum[:, None])

        local = labels - start
        owned = (local >= 0) & (local < valid)
        local = local.clamp(0, max(valid - 1, 0))
        chosen = z.gather(1, local[:, None]).squeeze(1) * owned if valid else torch.zeros_like(maximum)
        exponentials = z.exp()
        sums = torch.stack([exponentials.sum(-1), (exponentials * z).sum(-1), chosen])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        normaliser, weighted, chosen = sums
        log_normaliser = normaliser.log()
        entropy = log_normaliser - weighted / normaliser

        ctx.save_for_backward(z, log_normaliser, entropy, local, owned)
        ctx.temperature, ctx.valid, ctx.logits_like = temperature, valid, (logits.shape, logits.dtype)
        return chosen - log_normaliser, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        """`d log p_y = 1[y] - p` and `d H = -p (log p + H)`, each over the temperature."""
        z, log_normaliser, entropy, local, owned = ctx.saved_tensors
        log_p = z - log_normaliser[:, None]
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_probs[:, None]).mul_(p)
        if ctx.valid:
            grad.scatter_add_(1, local[:, None], (grad_log_probs * owned)[:, None])
        shape, dtype = ctx.logits_like
        result = torch.zeros(shape, dtype=dtype, device=grad.device)
        result[:, : ctx.valid] = grad.div_(ctx.temperature)
        return result, None, None, None, None, None


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each position under `softmax(logits / temperature)`.

    Args:
        logits: `[T, V/tp]`, this tensor-parallel rank's columns of the padded vocabulary.
        labels: `[T]` ids in the whole vocabulary.
        vocab_size: without padding; padded columns take no part, forward or backward.
        group: the tensor-parallel group.

    Returns two `[T]` vectors, the same on every rank of the group.
    """
    columns = logits.size(1)
    start = group.rank() * columns
    valid = min(max(vocab_size - start, 0), columns)
    return _LogProbsAndEntropy.apply(logits, labels, temperature, valid, start, group)
