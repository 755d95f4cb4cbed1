"""The closures of the hook: actor loss, critic loss, and the forward-only passes.

They see actions only: A rows of the model's output, and a batch of A positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mppo.algorithm.actor_loss import ActorTerms, actor_loss
from mppo.algorithm.policy_losses import PolicyInputs
from mppo.algorithm.rollout_correction import PREFIX, mismatch
from mppo.algorithm.statistics import mean, prefixed, total
from mppo.algorithm.value_loss import clipped_value_loss
from mppo.batch.packed import PackedBatch
from mppo.megatron.head import HeadOutput, LastHidden, PolicyHead


def weighted_sum(token_loss: Tensor, batch: PackedBatch, total_tokens: int) -> tuple[Tensor, Tensor]:
    """The loss of a piece of the mini-batch and its tokens, as Megatron's per-token scaling wants them.

    `N * sum(w * token_loss)` and the int count of all tokens of the piece's trajectories, prompts included; N =
    `total_tokens`, that of the global mini-batch, is what the counts add up to and what Megatron divides by. The loss
    does not depend on what is counted; the auxiliary losses of a mixture of experts do, for Megatron multiplies that of
    a micro-batch by the tokens that were routed. Padding is routed too, but neither counted here nor there.
    """
    kept = torch.where(batch.loss_mask, token_loss, torch.zeros_like(token_loss)).double()
    loss = (kept * (batch["token_weights"] * total_tokens)).sum()
    # A token loss that is not finite may have a finite gradient. Made NaN, its gradient is seen where all ranks look at
    # the norm before they step, and nobody has to wait for the loss.
    loss = loss * torch.where(torch.isfinite(kept).all(), 1.0, torch.nan)
    count = torch.full((), batch.real_tokens, dtype=torch.int, device=loss.device)
    return loss.to(token_loss.dtype), count


class Offenders:
    """How many losses that are not finite trajectories brought; kept on the device until somebody asks."""

    def __init__(self):
        self._counts: list[tuple[Tensor, Tensor]] = []

    def look(self, token_loss: Tensor, batch: PackedBatch) -> None:
        """Remember what there is of a micro-batch."""
        non_finite = batch.loss_mask & ~torch.isfinite(token_loss.detach())
        self._counts.append((batch.indices, batch.segments.lengths(non_finite)))

    def tokens(self) -> dict[int, int]:
        """Those of each trajectory concerned, by its index in the batch of the step. Waits for the device."""
        pairs = [pair for x in self._counts for pair in zip(*(part.tolist() for part in x), strict=True)]
        return {index: count for index, count in pairs if count}


@dataclass(frozen=True)
class PolicyObjective:
    """`L = L_PG - entropy_coeff * H + kl_loss_coef * KL_ref`, each a token loss under the same weights."""

    head: PolicyHead
    terms: ActorTerms
    total_tokens: int
    """Of all trajectories of the global mini-batch, prompts included."""
    reference_weight: Tensor | None = None
    """`[V/tp, H]` of the reference, for the exact KL; the batch then brings `ref_hidden`."""
    combine: Callable[[Tensor], Tensor] | None = None
    """Adds up over context-parallel ranks, where trajectories are cut over them (see `Segments.combine`)."""
    offenders: Offenders = field(default_factory=Offenders)
    prefix: ClassVar[str] = "actor/"
    wants_hidden: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"policy loss {self.terms.policy_loss.name!r}"

    @staticmethod
    def reads(terms: ActorTerms) -> tuple[str, ...]:
        """The fields of the batch that it reads with these terms; those that a run does not have are left out."""
        policies = ("old_log_probs", "rollout_log_probs", "ref_log_probs")
        return ("advantages", *policies, "rollout_is_weights", "prepared", *["ref_hidden"] * terms.uses_full_kl)

    def __call__(self, output: LastHidden, batch: PackedBatch):
        """Megatron's triple. Raises ConfigError when the policy loss does not return one loss per token."""
        mask = batch.loss_mask
        head = self._head(output, batch)
        old_log_probs, ref_log_probs = batch.get("old_log_probs"), batch.get("ref_log_probs")
        if old_log_probs is None:  # the anchor is the current policy itself
            old_log_probs = head.log_probs.detach()
        inputs = PolicyInputs(
            log_probs=torch.where(mask, head.log_probs, 0.0),
            old_log_probs=torch.where(mask, old_log_probs, 0.0),
            advantages=batch["advantages"],
            mask=mask,
            segments=replace(batch.segments, combine=self.combine),
            rollout_is_weights=batch.get("rollout_is_weights"),
            rollout_log_probs=batch.get("rollout_log_probs"),
            ref_log_probs=None if ref_log_probs is None else torch.where(mask, ref_log_probs, 0.0),
            prepared=batch.prepared,
        )
        loss, reported = actor_loss(
            inputs,
            batch["token_weights"],
            self.terms,
            None if head.entropy is None else torch.where(mask, self._trained(head.entropy), 0.0),
            None if head.full_kl is None else torch.where(mask, head.full_kl, 0.0),
        )
        self.offenders.look(loss, batch)
        statistics = prefixed(self.prefix, reported)
        if batch.get("old_log_probs") is None:  # no pass of its own has told how far it is from the rollout's policy
            log_ratio = old_log_probs.double() - batch["rollout_log_probs"].double()
            statistics |= prefixed(PREFIX, mismatch(log_ratio, mask))
        return *weighted_sum(loss, batch, self.total_tokens), statistics

    def _head(self, output: LastHidden, batch: PackedBatch) -> HeadOutput:
        reference, names = None, ["log_probs"]
        if self.terms.uses_entropy:
            names.append("entropy")
        if self.terms.uses_full_kl:
            reference = LastHidden(batch["ref_hidden"], self.reference_weight)
            names.append("full_kl")
        return self.head(output, batch.labels, reference, names)

    def _trained(self, entropy: Tensor) -> Tensor:
        """Without gradient where it is only reported: the head then does no work for it backward."""
        return entropy if self.terms.entropy_coeff else entropy.detach()


@dataclass(frozen=True)
class ValueObjective:
    """The clipped value loss."""

    cliprange: float
    total_tokens: int
    """Of all trajectories of the global mini-batch, prompts included."""
    offenders: Offenders = field(default_factory=Offenders)
    reads: ClassVar[tuple[str, ...]] = ("values", "returns")
    prefix: ClassVar[str] = "critic/"
    name: ClassVar[str] = "the value loss"
    wants_hidden: ClassVar[bool] = False

    def __call__(self, values: Tensor, batch: PackedBatch):
        """Megatron's triple for values `[A, 1]`."""
        loss, reported = clipped_value_loss(values.squeeze(-1), batch["values"], batch["returns"], self.cliprange)
        statistics = {name: s.reduce(batch.loss_mask) for name, s in reported.items()}
        statistics["vf_loss"] = total(torch.where(batch.loss_mask, loss.detach(), 0.0) * batch["token_weights"])
        self.offenders.look(loss, batch)
        return *weighted_sum(loss, batch, self.total_tokens), prefixed(self.prefix, statistics)


@dataclass(frozen=True)
class SupervisedObjective:
    """Cross entropy: the negative log-prob of the actions, which is what a supervised answer's tokens are."""

    head: PolicyHead
    total_tokens: int
    """Of all trajectories of the global mini-batch, prompts included."""
    offenders: Offenders = field(default_factory=Offenders)
    reads: ClassVar[tuple[str, ...]] = ()
    prefix: ClassVar[str] = "sft/"
    name: ClassVar[str] = "the cross entropy"
    wants_hidden: ClassVar[bool] = True

    def __call__(self, output: LastHidden, batch: PackedBatch):
        """Megatron's triple."""
        mask = batch.loss_mask
        loss = -torch.where(mask, self.head(output, batch.labels, names=("log_probs",)).log_probs, 0.0)
        statistics = {
            "loss": total(loss * batch["token_weights"]),
            "token_loss": mean(loss, mask),
        }
        self.offenders.look(loss, batch)
        return *weighted_sum(loss, batch, self.total_tokens), prefixed(self.prefix, statistics)


Objective = PolicyObjective | ValueObjective | SupervisedObjective


class ForwardPass(Protocol):
    """A closure of forward-only passes. It returns the named vectors and `origin`, where each entry belongs."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the batch that it reads."""
        ...

    @property
    def wants_hidden(self) -> bool: ...

    def __call__(self, output: Any, batch: PackedBatch, /) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class LogProbPass:
    """Log-probs, and what else `names` asks for: `entropy`, `sum_pi_squared` (`[A]`), `hidden` (`[A, H]`)."""

    head: PolicyHead
    names: tuple[str, ...] = ("log_probs",)
    reads: ClassVar[tuple[str, ...]] = ()
    wants_hidden: ClassVar[bool] = True

    def __call__(self, output: LastHidden, batch: PackedBatch) -> dict[str, Tensor]:
        found = vars(self.head(output, batch.labels, names=self.names))
        if "hidden" in self.names:  # to the host at once: the schedule holds what every micro-batch returns
            found = found | {"hidden": output.hidden.cpu()}
        return {name: found[name] for name in self.names} | {"origin": batch.origin}


@dataclass(frozen=True)
class ReferencePass:
    """The same of the reference, and where the anchor's output weight is given, `full_kl`: KL(anchor || reference)."""

    head: PolicyHead
    names: tuple[str, ...] = ("log_probs",)
    anchor_weight: Tensor | None = None
    """`[V/tp, H]`; the batch then brings `old_hidden`."""
    reads: ClassVar[tuple[str, ...]] = ("old_hidden",)
    wants_hidden: ClassVar[bool] = True

    def __call__(self, output: LastHidden, batch: PackedBatch) -> dict[str, Tensor]:
        result = LogProbPass(self.head, tuple(n for n in self.names if n != "full_kl"))(output, batch)
        if "full_kl" in self.names:
            anchor = LastHidden(batch["old_hidden"], self.anchor_weight)
            result["full_kl"] = self.head(anchor, batch.labels, output, ("full_kl",)).full_kl
        return result


@dataclass(frozen=True)
class ValuePass:
    """`[A]` values of a value head's output `[A, 1]`."""

    names: tuple[str, ...] = ("values",)
    reads: ClassVar[tuple[str, ...]] = ()
    wants_hidden: ClassVar[bool] = False

    def __call__(self, values: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
        return {"values": values.squeeze(-1), "origin": batch.origin}
