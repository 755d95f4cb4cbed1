"""What a policy loss is given and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm.kl import LOG_RATIO_LIMIT
from mppo.algorithm.policy_losses.mini_batch import MiniBatchInputs
from mppo.algorithm.segments import Segments
from mppo.algorithm.statistics import TokenStatistic
from mppo.errors import ConfigError
from mppo.registry import Registry, Traits


@dataclass(frozen=True)
class PolicyInputs:
    """Packed `[T]` vectors; index t is about the action that produced token t+1."""

    log_probs: Tensor
    """Current policy; the only one with a gradient."""
    old_log_probs: Tensor
    """The PPO anchor."""
    advantages: Tensor
    mask: Tensor
    """Which positions are actions that train. Values outside it are arbitrary; log-probs there are finite."""
    segments: Segments
    rollout_is_weights: Tensor | None = None
    """Importance weights of the rollout correction. `actor_loss` multiplies the token losses by them, unless the loss
    is registered with `applies_importance_weights=True`."""
    rollout_log_probs: Tensor | None = None
    """The policy that generated."""
    ref_log_probs: Tensor | None = None
    """The frozen reference, where there is one."""
    prepared: Mapping[str, Tensor] = field(default_factory=dict)
    """What the `prepare` of the loss returned, cut like everything else."""
    stop_gradient: Callable[[Tensor], Tensor] = field(default_factory=lambda: torch.detach)
    """Take a factor out of the gradient. `mppo check-loss` holds what goes through here fixed in its finite
    differences, so a loss that means to stop a gradient says so with this, not with `detach`."""

    @property
    def log_ratio(self) -> Tensor:
        """`log pi - log pi_old`, clamped to +-20 before anything exponentiates it; zero gradient beyond."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class TokenLosses:
    """Token losses and the metrics of a loss."""

    loss: Tensor
    """`[T]`, to be minimised; not masked, not averaged."""
    statistics: dict[str, TokenStatistic] = field(default_factory=dict)


@torch.no_grad()
def anchor_statistics(x: PolicyInputs) -> dict[str, TokenStatistic]:
    """How far the current policy is from the anchor, reported with every loss; no gradient.

    `log_ratio_saturated`: log-ratios beyond +-20, where a loss that exponentiates them has no gradient left.
    """
    saturated = (x.log_probs - x.old_log_probs).abs() > LOG_RATIO_LIMIT
    return {
        "ratio_deviation": TokenStatistic((x.log_ratio.exp() - 1).abs()),
        "log_ratio_saturated": TokenStatistic(saturated.float()),
    }


@dataclass(frozen=True)
class PolicyLossTraits(Traits):
    """What a policy loss declares."""

    loss_agg_mode: str = "token-mean"
    """The aggregation mode of its paper, where the configuration names none."""
    prepare: Callable[..., dict[str, Tensor]] | None = None
    """`(MiniBatchInputs, config) -> {name: [T]}`: what it must know of the whole mini-batch before the pass."""
    applies_importance_weights: bool = False
    """The loss multiplies by `rollout_is_weights` itself; otherwise `actor_loss` does."""


POLICY_LOSSES: Registry[Callable[..., TokenLosses], PolicyLossTraits] = Registry("policy loss", PolicyLossTraits)
"""`(PolicyInputs, config) -> TokenLosses`."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss with its knobs set."""

    name: str
    fn: Callable[[PolicyInputs], TokenLosses]
    traits: PolicyLossTraits = PolicyLossTraits()
    """Here with the knobs of `prepare` set: `(MiniBatchInputs) -> {name: [T]}`."""

    @property
    def loss_agg_mode(self) -> str:
        return self.traits.loss_agg_mode

    @property
    def needs_mini_batch(self) -> bool:
        """Whether there is a `prepare` step."""
        return self.traits.prepare is not None

    def __call__(self, x: PolicyInputs) -> TokenLosses:
        """Token losses, without importance weights unless the loss applies them itself, and the metrics of the anchor.

        Raises ConfigError when the loss returns something else than one loss per token, and when what its `prepare`
        finds is missing.
        """
        if self.needs_mini_batch and not x.prepared:
            raise ConfigError(
                f"policy loss {self.name!r} needs what its prepare finds in the mini-batch: give PolicyInputs (or the"
                " packed batch) prepared=loss.prepare(MiniBatchInputs(...))"
            )
        result = self.fn(x)
        self._check(result, x.mask)
        return replace(result, statistics=anchor_statistics(x) | result.statistics)

    def prepare(self, x: MiniBatchInputs) -> dict[str, Tensor]:
        """What the loss must know of the mini-batch, nothing if it has no such step.

        Raises ConfigError for anything but `[T]` tensors.
        """
        found = {} if self.traits.prepare is None else self.traits.prepare(x)
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.shape != x.mask.shape:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(
                    f"prepare of policy loss {self.name!r} returned {name} of shape {shape}; one entry per token is"
                    f" needed, {list(x.mask.shape)}"
                )
        return found

    def _check(self, result: Any, mask: Tensor) -> None:
        wanted = f"a policy loss returns TokenLosses with one loss per token, {list(mask.shape)}"
        if not isinstance(result, TokenLosses):
            raise ConfigError(f"policy loss {self.name!r} returned a {type(result).__name__}; {wanted}")
        given = {"loss": result.loss} | {name: s.value for name, s in result.statistics.items()}
        for name, value in given.items():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape != list(mask.shape):
                hint = " (a mean? mppo multiplies by token weights and sums)" if shape == [] else ""
                raise ConfigError(f"policy loss {self.name!r} returned {name} of shape {shape}{hint}; {wanted}")


def policy_loss(name: str, knobs: Mapping[str, Any] | None = None, where: str = "policy_loss") -> PolicyLoss:
    """The loss of that name or import path, with these knobs; `where` is their place in the configuration.

    Raises ConfigError for an unknown name, and for a knob that the loss does not read.
    """
    plugin = POLICY_LOSSES.get(name)
    config = plugin.configure(dict(knobs or {}), where)
    traits = plugin.traits
    if traits.prepare is not None:
        traits = replace(traits, prepare=plugin.with_config(traits.prepare, config))
    return PolicyLoss(name, plugin.with_config(plugin.fn, config), traits)
