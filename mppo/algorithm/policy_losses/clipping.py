"""The clip range that several losses share."""

from dataclasses import dataclass

from mppo.errors import ConfigError


@dataclass(frozen=True)
class ClipConfig:
    clip_ratio: float = 0.2
    """epsilon on both sides, unless a side is given."""
    clip_ratio_low: float | None = None
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: float | None = None
    """The ratio is clipped above at 1 + this."""

    def __post_init__(self):
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"actor.policy_loss.{name} is {value}; it must not be negative")

        if None not in (self.clip_ratio_low, self.clip_ratio_high) and self.clip_ratio != 0.2:
            raise ConfigError(
                "actor.policy_loss.clip_ratio has no effect beside both clip_ratio_low and clip_ratio_high; unset it"
            )

    @property
    def low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
