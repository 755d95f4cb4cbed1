"""PPO's losses over dense padded batches, `[B, L]`, by plain torch and autograd: nothing of mppo is in here.

Column t of everything `[B, L-1]` is about predicting `tokens[:, t+1]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CLIP, DUAL_CLIP, VALUE_CLIP = 0.2, 3.0, 0.2
ENTROPY_COEFF, KL_COEFF = 0.1, 0.05
NORM = 16.0
"""C of seq-mean-token-sum-norm."""

LENGTHS = (9, 6, 6, 12, 3, 5, 8, 6)
PROMPTS = (2, 3, 1, 4, 3, 2, 5, 1)
"""The fifth trajectory is nothing but prompt: it trains nothing."""


@dataclass
class DenseBatch:
    tokens: Tensor
    """`[B, L]`, padded on the right."""
    lengths: Tensor
    """`[B]`"""
    mask: Tensor
    """`[B, L-1]` bool: which predicted tokens are actions."""
    noise: dict[str, Tensor]
    """`[B, L-1]` standard normal, one for each made-up field."""


def random_batch(vocabulary: int) -> DenseBatch:
    generator = torch.Generator().manual_seed(7)
    lengths, prompts = torch.tensor(LENGTHS), torch.tensor(PROMPTS)
    shape = (len(lengths), int(lengths.max()))
    predicted = torch.arange(1, shape[1])
    mask = (predicted >= prompts[:, None]) & (predicted < lengths[:, None])
    mask[3, 6:8] = False  # output of a tool in the middle of a response
    names = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
    noise = {name: torch.randn(shape[0], shape[1] - 1, generator=generator) for name in names}
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    return DenseBatch(tokens, lengths, mask, noise)


def hidden_states(backbone: torch.nn.Module, batch: DenseBatch) -> Tensor:
    """`[B, L-1, H]`"""
    attended = torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]
    return backbone(batch.tokens, attention_mask=attended.long()).last_hidden_state[:, :-1]


def log_probs_and_entropy(logits: Tensor, batch: DenseBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """`[B, L-1, V]` -> two of `[B, L-1]`."""
    log_p = torch.log_softmax(logits / temperature, -1)
    chosen = log_p.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


def policy_losses(
    log_probs: Tensor, entropy: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, advantages: Tensor
) -> dict[str, Tensor]:
    """Token losses `[B, L-1]`: the clipped surrogate with the dual clip, k3, entropy, and their sum."""
    ratio = torch.exp(log_probs - old_log_probs)
    objective = torch.minimum(ratio * advantages, ratio.clip(1 - CLIP, 1 + CLIP) * advantages)
    bounded = torch.maximum(objective, DUAL_CLIP * advantages)
    objective = torch.where(advantages < 0, bounded, objective)
    towards_ref = ref_log_probs - log_probs
    kl = torch.expm1(towards_ref) - towards_ref
    loss = -objective - ENTROPY_COEFF * entropy + KL_COEFF * kl
    return {"pg_loss": -objective, "kl_loss": kl, "entropy_loss": entropy, "loss": loss}


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Token losses `[B, L-1]`."""
    near = old_values + (values - old_values).clip(-VALUE_CLIP, VALUE_CLIP)
    return {"vf_loss": torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2}


def balance_loss(logits: list[Tensor], batch: DenseBatch, pieces: list[list[int]], topk: int) -> Tensor:
    """Switch Transformer's loss (arXiv:2101.03961, eq. 4) of each layer and micro-batch: the mean over micro-batches
    weighted by their tokens, summed over layers.

    `logits` are those of each layer's router, `[B * L, E]`; `pieces` are the trajectories of each micro-batch.
    """
    attended = torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]
    total = torch.zeros(())
    for of_layer in logits:
        scores = of_layer.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(topk).indices, 1.0)
        for piece in pieces:
            rows = torch.zeros_like(attended)
            rows[piece] = attended[piece]
            rows = rows.flatten()
            shares = chosen[rows].mean(0) / topk
            total = total + rows.sum() * scores.size(1) * (shares * scores[rows].mean(0)).sum()
    return total / batch.lengths.sum()


def aggregate(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The five modes, each as its name says; trajectories without an action count nowhere."""
    sums, counts = (losses * mask).sum(-1), mask.sum(-1)
    training = counts > 0
    match mode:
        case "token-mean":
            return losses[mask].mean()
        case "token-sum":
            return losses[mask].sum()
        case "seq-mean-token-sum":
            return sums[training].mean()
        case "seq-mean-token-mean":
            return (sums[training] / counts[training]).mean()
        case "seq-mean-token-sum-norm":
            return (sums[training] / NORM).mean()
    raise ValueError(mode)
