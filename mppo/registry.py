"""Named plugins: losses, estimators, KL forms, aggregation modes, rewards and prompt generators.

A plugin is found by its registered name, by an import path (`my_pkg.losses:my_loss`), or after loading the
entry points of the group `mppo.plugins`, whose modules register by decorator when they are imported.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Generic

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import TypeVar

from mppo.errors import ConfigError


@dataclass(frozen=True)
class NoConfig:
    """The configuration of a plugin that has no knobs."""


@dataclass(frozen=True)
class Traits:
    """What plugins of one kind declare beside their knobs: a subclass for each kind that declares anything.

    Every field has a default, which holds for a callable that is found by its import path and was never registered.
    """


T = TypeVar("T", bound=Callable)
Declared = TypeVar("Declared", bound=Traits, default=Traits)


@dataclass(frozen=True)
class Plugin(Generic[T, Declared]):
    """A registered callable, the dataclass of its knobs, and what else was declared with it."""

    name: str
    fn: T
    config: type
    """The dataclass of its knobs."""
    traits: Declared
    """What the callable is or needs, as far as mppo must know it."""

    def configure(self, values: dict[str, Any], where: str) -> Any:
        """The plugin's typed configuration from `values`, as `typed` builds it."""
        return typed(self.config, values, where, repr(self.name))

    def with_config(self, fn: Callable, config: Any) -> Callable:
        """`fn` with the configuration as its keyword `config`; as it is if the plugin has no knobs."""
        return fn if self.config is NoConfig else partial(fn, config=config)

    def bind(self, values: dict[str, Any], where: str) -> Callable:
        """The callable with its configuration given."""
        return self.with_config(self.fn, self.configure(values, where))


def typed(schema: type, values: dict[str, Any], where: str, reader: str) -> Any:
    """An instance of the dataclass `schema` from `values`, whose place in the configuration is `where`.

    Raises ConfigError for a knob that `reader` does not read, and for a value of the wrong type.
    """
    known = [f.name for f in fields(schema)]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{where}.{key}: {reader} does not read this knob"
                f" ({'it reads ' + ', '.join(known) if known else 'it has none'}){nearest(key, known)}"
            )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        raise ConfigError(f"{where}.{error.full_key}: {str(error).splitlines()[0]}") from error


class Registry(Generic[T, Declared]):
    """A name -> Plugin table for one kind of thing."""

    def __init__(self, kind: str, traits: type[Declared] = Traits):  # type: ignore[assignment]
        self.kind, self._traits = kind, traits
        self._plugins: dict[str, Plugin[T, Declared]] = {}

    def register(
        self, name: str, *, config: type = NoConfig, override: bool = False, **traits: Any
    ) -> Callable[[T], T]:
        """Decorator: register a callable under `name`, with the dataclass of its knobs and its traits.

        Raises ConfigError when the name is taken and `override` is not set: names cannot clash silently; and for a
        trait that this kind does not have.
        """
        known = [f.name for f in fields(self._traits)]
        for trait in traits:
            if trait not in known:
                raise ConfigError(f"{self.kind} {name!r}: there is no trait {trait!r}{nearest(trait, known)}")
        declared = self._traits(**traits)

        def decorate(fn: T) -> T:
            if name in self._plugins and not override:
                raise ConfigError(f"{self.kind} {name!r} is registered already; pass override=True to replace it")
            self._plugins[name] = Plugin(name, fn, config, declared)
            return fn

        return decorate

    def names(self) -> list[str]:
        return sorted(self._plugins)

    def get(self, name: str) -> Plugin[T, Declared]:
        """Find a plugin by name or import path. Raises ConfigError that lists the known names and the nearest."""
        if ":" in name:
            return self._imported(name)
        if name not in self._plugins:
            for entry_point in entry_points(group="mppo.plugins"):
                entry_point.load()
        if name not in self._plugins:
            raise ConfigError(
                f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}; "
                f"or give an import path, package.module:function{nearest(name, self.names())}"
            )
        return self._plugins[name]

    def _imported(self, path: str) -> Plugin[T, Declared]:
        module_name, _, attribute = path.partition(":")
        try:
            target = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.kind} {path!r} cannot be imported: {error}") from error
        if not callable(target):
            raise ConfigError(f"{self.kind} {path!r} is not callable")
        registered = next((p for p in self._plugins.values() if p.fn is target), None)
        return registered or Plugin(path, target, getattr(target, "config", NoConfig), self._traits())


def check_signature(fn: Callable, arguments: tuple[str, ...], who: str) -> None:
    """Raise ConfigError unless `fn` can be called with so many positional arguments; `who` names it in the error."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # of what is written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{who} has the signature {signature}, and is called with ({', '.join(arguments)}): {error}"
        ) from error


def nearest(name: str, known: Iterable[str], where: str = "") -> str:
    """`; did you mean X?` for the closest known name, which `where` precedes, or the empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {where + close[0]!r}?" if close else ""
