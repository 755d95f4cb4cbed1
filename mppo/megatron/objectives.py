"""The closures of the hook: actor loss, critic loss, and the forward-only passes.

They see actions only: A rows of the model's output, and a batch of A positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.algorithm.kl import kl_penalty
from mppo.algorithm.policy_losses import PolicyInputs, TokenLosses, anchor_statistics
from mppo.algorithm.statistics import Ratio
from mppo.algorithm.value_loss import clipped_value_loss
from mppo.batch.packed import PackedBatch
from mppo.megatron.vocab_parallel import log_probs_and_entropy


@dataclass(frozen=True)
class PolicyHead:
    """How logits become log-probs: the vocabulary, the temperature of the rollout, the tensor-parallel group."""

    vocab_size: int
    temperature: float
    tp_group: dist.ProcessGroup

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, V/tp]`, `[T]` -> log-probs and entropy, `[T]` each."""
        return log_probs_and_entropy(logits, labels, self.vocab_size, self.temperature, self.tp_group)


def weighted_sum(token_loss: Tensor, batch: PackedBatch, actions: int) -> tuple[Tensor, Tensor]:
    """The loss of a piece of the mini-batch and its tokens, as Megatron's per-token scaling wants them.

    `N * sum(w * token_loss)` and the int count of actions; N = `actions`, that of the global mini-batch, is what the
    counts add up to and what Megatron divides by.
    """
    kept = torch.where(batch.training, token_loss, torch.zeros_like(token_loss)).double()
    loss = (kept * (batch.weights * actions)).sum()
    return loss.to(token_loss.dtype), batch.mask.sum().int()


def weighted_total(token_values: Tensor, batch: PackedBatch) -> Ratio:
    """The same sum as a metric, without N."""
    return Ratio.total(torch.where(batch.training, token_values.detach(), 0.0) * batch.weights)


@dataclass(frozen=True)
class PolicyObjective:
    """`L = L_PG - entropy_coeff * H + kl_loss_coef * KL_ref`, each a token loss under the same weights."""

    head: PolicyHead
    policy_loss: Callable[[PolicyInputs], TokenLosses]
    actions: int
    """Of the global mini-batch."""
    entropy_coeff: float = 0.0
    report_entropy: bool = False
    kl_loss_coef: float | None = None
    """None: no loss-side KL."""
    kl_loss_type: str = "low_var_kl"

    def __call__(self, logits: Tensor, batch: PackedBatch):
        """Megatron's triple for logits `[A, V/tp]`. Raises ValueError when the loss does not return `[A]`."""
        mask = batch.training
        log_probs, entropy = (torch.where(mask, x, 0.0) for x in self.head(logits, batch.labels))
        inputs = PolicyInputs(
            log_probs=log_probs,
            old_log_probs=torch.where(mask, batch.old_log_probs, 0.0),
            advantages=batch.advantages,
            mask=mask,
            segments=batch.segments,
        )
        pg = self.policy_loss(inputs)
        if pg.loss.shape != mask.shape:
            raise ValueError(f"a policy loss returns token losses {tuple(mask.shape)}, got {tuple(pg.loss.shape)}")
        reported = pg.statistics | anchor_statistics(inputs)
        statistics = {f"actor/{name}": s.reduce(mask) for name, s in reported.items()}
        statistics["actor/pg_loss"] = weighted_total(pg.loss, batch)
        loss = pg.loss
        if self.entropy_coeff or self.report_entropy:
            loss = loss - self.entropy_coeff * entropy
            statistics["actor/entropy_loss"] = weighted_total(entropy, batch)
            statistics["actor/entropy"] = Ratio.mean(entropy.detach(), mask)
        if self.kl_loss_coef is not None:
            kl = kl_penalty(log_probs, torch.where(mask, batch.ref_log_probs, 0.0), self.kl_loss_type)
            loss = loss + self.kl_loss_coef * kl
            statistics["actor/kl_loss"] = weighted_total(kl, batch)
        statistics["actor/loss"] = weighted_total(loss, batch)
        return *weighted_sum(loss, batch, self.actions), statistics


@dataclass(frozen=True)
class ValueObjective:
    """The clipped value loss."""

    cliprange: float
    actions: int
    """Of the global mini-batch."""

    def __call__(self, values: Tensor, batch: PackedBatch):
        """Megatron's triple for values `[A, 1]`."""
        loss, reported = clipped_value_loss(values.squeeze(-1), batch.values, batch.returns, self.cliprange)
        statistics = {f"critic/{name}": s.reduce(batch.training) for name, s in reported.items()}
        statistics["critic/vf_loss"] = weighted_total(loss, batch)
        return *weighted_sum(loss, batch, self.actions), statistics


class ForwardPass(Protocol):
    """A closure of forward-only passes. It returns the named vectors and `origin`, where each entry belongs."""

    names: tuple[str, ...]

    def __call__(self, output: Tensor, micro_batch: PackedBatch) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class LogProbPass:
    """`[A]` log-probs, and entropy when `names` has it, of logits `[A, V/tp]`."""

    head: PolicyHead
    names: tuple[str, ...] = ("log_probs",)

    def __call__(self, logits: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
        log_probs, entropy = self.head(logits, batch.labels)
        return {"log_probs": log_probs, "entropy": entropy, "origin": batch.origin}


@dataclass(frozen=True)
class ValuePass:
    """`[A]` values of a value head's output `[A, 1]`."""

    names: tuple[str, ...] = ("values",)

    def __call__(self, values: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
        return {"values": values.squeeze(-1), "origin": batch.origin}
