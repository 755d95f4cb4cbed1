"""Forms of the KL against the frozen reference, and the controller of its coefficient.

Sampled forms: http://joschu.net/blog/kl-approx.html. Controller: 1909.08593.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.errors import ConfigError
from mppo.registry import Registry, Traits

LOG_RATIO_LIMIT = 20.0
"""Every log-ratio that is exponentiated is clamped to plus and minus this, so that no exp overflows or dominates."""


@dataclass(frozen=True)
class KLFormTraits(Traits):
    """What a KL form declares."""

    saturated: Callable[[Tensor], Tensor] | None = None
    """`d [T] -> [T]` bool: where a clamp takes the gradient away; None for a form without clamps."""


KL_FORMS: Registry[Callable[..., Tensor], KLFormTraits] = Registry("KL form", KLFormTraits)
"""`d [T] -> penalty [T]`, d = log pi - log ref of the sampled token."""


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


def k3_saturated(d: Tensor) -> Tensor:
    """Where a clamp of k3 has taken its gradient away: d below -2.61 or so, or above 11."""
    return (torch.exp(-d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + d - 1).abs() > 10.0


@KL_FORMS.register("low_var_kl", saturated=k3_saturated)
@KL_FORMS.register("k3", saturated=k3_saturated)
def k3(d: Tensor) -> Tensor:
    """`clip(exp(-d) + d - 1, -10, 10)` (http://joschu.net/blog/kl-approx.html): zero gradient where it saturates."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-d) + d - 1).clamp(-10.0, 10.0)


FULL = "full"
"""The name of the exact KL. It is no function of the sampled token, so it goes through the output head."""


@KL_FORMS.register(FULL)
def full(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`sum_v p (log p - log q)` over the vocabulary, `[..., V] -> [...]`: KL(pi || ref) of each state, exact.

    This is the definition. Training computes it from vocabulary-parallel pieces, `mppo.megatron.head`.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def check_kl_form(form: str, where: str) -> None:
    """Raise ConfigError for an unknown form, and for `full+`; `where` is its place in the configuration."""
    KL_FORMS.get(form.removesuffix("+"))
    if form == FULL + "+":
        raise ConfigError(f"{where}=full+: full has an exact gradient of its own; use full")


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, form: str) -> Tensor:
    """The penalty of each token, `[T]`.

    A form with a trailing `+` has the value of the form and the gradient of k2 (straight-through).
    Raises ConfigError for an unknown form, and for `full`, which needs more than the sampled token.
    """
    if form == FULL:
        raise ConfigError("the full KL is over the vocabulary; it comes from the output head, not from log-probs")
    d = log_probs - ref_log_probs
    value = KL_FORMS.get(form.removesuffix("+")).fn(d)
    if not form.endswith("+"):
        return value
    surrogate = k2(d)
    return surrogate - surrogate.detach() + value.detach()


def kl_saturated(log_probs: Tensor, ref_log_probs: Tensor, form: str) -> Tensor | None:
    """`[T]` bool: tokens whose KL gradient a clamp has zeroed; None for a form without clamps."""
    if form.endswith("+"):
        return None  # its gradient is that of k2
    saturated = KL_FORMS.get(form).traits.saturated
    return None if saturated is None else saturated(log_probs - ref_log_probs)


@dataclass
class KLController:
    """The coefficient beta of the KL in the reward: fixed, or steered towards a target."""

    coefficient: float
    target: float | None = None
    """None: fixed."""
    horizon: int = 10000

    def update(self, current_kl: float, trajectories: int) -> None:
        """`beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * trajectories / horizon`; nothing when fixed."""
        if self.target is not None:
            error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * trajectories / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What changes in a run; target and horizon are the configuration's."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed coefficient is the configuration's too."""
        if self.target is not None:
            self.coefficient = state["coefficient"]
