"""No dead knobs: which fields a run would not read, as each class of the configuration says of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from mppo.errors import ConfigError


@dataclass(frozen=True)
class UpdateFacts:
    """Of the updates of one role."""

    mini_batches: int
    """Of an epoch."""
    loss_agg_mode: str
    reads_scale_factor: bool
    """Whether the role's `loss_scale_factor` is read: by its own aggregation mode, or by one that inherits it."""
    dtype: str


@dataclass(frozen=True)
class RunFacts:
    """What of a whole run decides whether a field of one class is read."""

    adv_estimator: str
    reads_rewards: bool
    """Whether the estimator reads the reward as a whole, not only its parts."""
    answers_per_prompt: int
    answers_may_end: bool
    has_validation: bool
    has_sources: bool
    """Whether rewards differ by data source."""
    bypass_mode: bool
    has_forward_only_pass: bool
    """Whether any pass is planned by the actor's limits of forward-only passes."""
    actor_parallel: Mapping[str, Any]
    """Of the actor's layout what a critic may have otherwise, by field."""
    updates: Mapping[str, UpdateFacts]
    """By role, `actor` and, where the estimator needs one, `critic`."""

    @property
    def has_critic(self) -> bool:
        return "critic" in self.updates


@dataclass(frozen=True)
class Unread:
    """A field that a run would not read, and what keeps it from that."""

    field: str
    """By its path from the class that says so."""
    reason: str


@runtime_checkable
class SaysUnread(Protocol):
    """A configuration class with fields that some runs do not read."""

    def unread(self, run: RunFacts) -> Iterator[Unread]: ...


def refuse_unread(config: Any, run: RunFacts) -> None:
    """Raise ConfigError for a field that differs from its default but would not be read; it says what would read it."""
    for path, reason in _set_in_vain(config, type(config)(), run, ""):
        raise ConfigError(f"{path} is set but would have no effect: {reason}; unset it or change that")


def _set_in_vain(config: Any, default: Any, run: RunFacts, where: str) -> Iterator[tuple[str, str]]:
    """Paths and reasons; those of a whole group before those of its fields."""
    for unread in config.unread(run) if isinstance(config, SaysUnread) else ():
        if _at(config, unread.field) != _at(default, unread.field):
            yield where + unread.field, unread.reason
    for field in fields(config):
        group = getattr(config, field.name)
        if is_dataclass(group) and not isinstance(group, type):
            yield from _set_in_vain(group, getattr(default, field.name) or type(group)(), run, f"{where}{field.name}.")


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config
