"""Sampled KL forms against the frozen reference, and the coefficient controllers (semantics section 4)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.registry import Registry

LOG_RATIO_LIMIT = 20.0
"""Every log-ratio that is exponentiated is clamped to plus and minus this (decisions: clamps)."""

KL_FORMS: Registry[Callable[[Tensor], Tensor]] = Registry("KL form")


@KL_FORMS.register("kl")
@KL_FORMS.register("k1")
def k1(d: Tensor) -> Tensor:
    """`d`: unbiased for KL(pi || ref) when the actions come from pi; one sample may be negative."""
    return d


@KL_FORMS.register("abs")
def absolute(d: Tensor) -> Tensor:
    """`|d|`: a distance, not a KL estimator."""
    return d.abs()


@KL_FORMS.register("mse")
@KL_FORMS.register("k2")
def k2(d: Tensor) -> Tensor:
    """`d^2 / 2`: its gradient is `d`; biased."""
    return 0.5 * d.square()


@KL_FORMS.register("low_var_kl")
@KL_FORMS.register("k3")
def k3(d: Tensor) -> Tensor:
    """`clip(exp(-d) + d - 1, -10, 10)` (http://joschu.net/blog/kl-approx.html): zero gradient where it saturates."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-d) + d - 1).clamp(-10.0, 10.0)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, form: str) -> Tensor:
    """The penalty of each token, `[T]`.

    A form with a trailing `+` has the value of the form and the gradient of k2 (straight-through).
    Raises ConfigError for an unknown form.
    """
    d = log_probs - ref_log_probs
    value = KL_FORMS.get(form.removesuffix("+")).fn(d)
    if not form.endswith("+"):
        return value
    surrogate = k2(d)
    return surrogate - surrogate.detach() + value.detach()


@dataclass
class KLController:
    """The coefficient beta of reward-side KL: fixed, or steered towards a target (1909.08593)."""

    coefficient: float
    target: float | None = None
    """None: fixed."""
    horizon: int = 10000

    def update(self, current_kl: float, trajectories: int) -> None:
        """`beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * trajectories / horizon`; nothing when fixed."""
        if self.target is not None:
            error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * trajectories / self.horizon
