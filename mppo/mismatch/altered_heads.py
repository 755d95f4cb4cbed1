"""Forward passes that score as training would if something were otherwise: another output layer, base or epsilon."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from mppo.batch.packed import PackedBatch
from mppo.megatron.head import LastHidden, PolicyHead
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.rotary import rotary_of
from mppo.mismatch.hypotheses import Change, Head

BLOCK = 1024
"""Tokens whose logits exist at a time."""
EQUAL = 1e-6
"""Logits that are as close count as equal."""


@dataclass(frozen=True)
class AlteredPass:
    """Log-probs `[A]` by another head than that of training."""

    head: PolicyHead
    change: Change
    padded_size: int
    """Rows of the whole output layer, padding included."""
    embedding: Tensor | None = None
    """`[V/tp, H]`: this rank's rows of the embedding, where they take the place of the output layer."""
    names: ClassVar[tuple[str, ...]] = ("log_probs",)
    reads: ClassVar[tuple[str, ...]] = ()
    wants_hidden: ClassVar[bool] = True

    def __call__(self, output: LastHidden, batch: PackedBatch) -> dict[str, Tensor]:
        head = replace(self.head, temperature=self.change.temperature, fp32_logits=True)
        weight = output.weight if self.embedding is None else self.embedding
        hidden = output.hidden
        if self.change.head is Head.BFLOAT16:
            head = replace(head, fp32_logits=False)
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        if self.change.head is Head.PADDED:
            head = replace(head, vocab_size=self.padded_size)
        found = head(LastHidden(hidden, weight), batch.labels, names=("log_probs",))
        return {"log_probs": found.log_probs.float(), "origin": batch.origin}


@dataclass(frozen=True)
class LikelihoodPass:
    """`[A]` each: what `Likelihoods` has of the token that was drawn."""

    head: PolicyHead
    temperature: float
    k: int
    names: ClassVar[tuple[str, ...]] = ("mass", "rank", "top")
    reads: ClassVar[tuple[str, ...]] = ()
    wants_hidden: ClassVar[bool] = True

    def __call__(self, output: LastHidden, batch: PackedBatch) -> dict[str, Tensor]:
        head = replace(self.head, temperature=self.temperature, fp32_logits=True)
        log_probs = head(output, batch.labels, names=("log_probs",)).log_probs.float()
        parts = zip(output.hidden.split(BLOCK), batch.labels.split(BLOCK), log_probs.split(BLOCK), strict=True)
        found = [self._of_block(hidden, labels, own, output.weight) for hidden, labels, own in parts]
        whole = torch.cat(found, dim=1) if found else log_probs.new_zeros(3, 0)
        return {**dict(zip(self.names, whole, strict=True)), "origin": batch.origin}

    def _of_block(self, hidden: Tensor, labels: Tensor, log_probs: Tensor, weight: Tensor) -> Tensor:
        """`[3, a]`. Each rank looks at its own words, and knows their probabilities by that of the drawn one."""
        group = self.head.tp_group
        start = group.rank() * len(weight)
        valid = min(max(self.head.vocab_size - start, 0), len(weight))
        logits = hidden.float() @ weight[:valid].float().t() / self.temperature
        column = labels - start
        here = (column >= 0) & (column < valid)
        own = logits.new_zeros(len(labels))
        if valid:
            own = torch.where(here, logits.gather(1, column.clamp(0, valid - 1)[:, None]).squeeze(1), 0.0)
        dist.all_reduce(own, group=group)
        above = logits - own[:, None]
        likely, p = above >= -EQUAL, (above + log_probs[:, None]).exp()
        sums = torch.stack([torch.where(likely, p, 0.0).sum(1), likely.sum(1).to(p.dtype)])
        dist.all_reduce(sums, group=group)
        return torch.cat([sums, self._top(p, group)[None]])

    def _top(self, p: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`[a]`: the sum of the `k` largest over all ranks."""
        mine = p.new_zeros(len(p), self.k)
        kept = min(self.k, p.size(1))
        mine[:, :kept] = p.topk(kept, dim=1).values
        everywhere = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everywhere, mine, group)
        return torch.cat(everywhere, dim=1).topk(self.k, dim=1).values.sum(1)


@contextmanager
def altered(chunks: Sequence[torch.nn.Module], model: ModelConfig, change: Change) -> Iterator[None]:
    """Inside, this rank's chunks have the rotary base and the epsilon of norms that the change names."""
    undo: list[tuple[object, str, object]] = []

    def put(owner: object, name: str, value: object) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for chunk in unwrap_model(list(chunks)):
            if change.rope_theta is not None:
                wrapped = rotary_of(chunk)
                rotary = chunk.rotary_pos_emb if wrapped is None else wrapped.rotary
                put(rotary, "inv_freq", frequencies(rotary, model, change.rope_theta))
            if change.rms_norm_eps is not None:
                for module in chunk.modules():
                    if getattr(module, "eps", None) == model.rms_norm_eps:
                        put(module, "eps", change.rms_norm_eps)
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def frequencies(rotary: Any, model: ModelConfig, theta: float) -> Tensor:
    """`[d/2]` of Megatron's rotary embedding with another base, and the model's own scaling."""
    now = rotary.inv_freq
    steps = torch.arange(0, 2 * len(now), 2, dtype=torch.float32, device=now.device) / (2 * len(now))
    found = 1.0 / theta**steps
    return found if model.rope_scaling is None else rotary._apply_scaling(found, factor=model.rope_scaling.factor)
