"""What a field may hold. Each raises ConfigError that names the field."""

import math

from mppo.errors import ConfigError


def positive(where: str, **values: int | float | None) -> None:
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{where}.{name} is {value}; it must be finite and greater than 0")


def not_negative(where: str, **values: int | float | None) -> None:
    for name, value in values.items():
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{where}.{name} is {value}; it must be finite and not negative")


def one_of(where: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(choices)}")
