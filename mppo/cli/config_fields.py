"""`mppo config`: every field of the configuration, and every knob of what is registered, as their definitions say."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, get_args

from rich.console import Console

from mppo.algorithm.advantages.estimator_contract import ESTIMATORS
from mppo.algorithm.policy_losses.loss_contract import POLICY_LOSSES
from mppo.algorithm.rollout_correction import RolloutCorrectionConfig
from mppo.cli.compose import dataclass_of
from mppo.config import Config
from mppo.errors import ConfigError
from mppo.registry import Registry
from mppo.rollout.tasks import GENERATORS, REWARDS

KNOBS: dict[str, tuple[str, Registry[Any, Any]]] = {
    "actor.policy_loss": ("loss_mode", POLICY_LOSSES),
    "algorithm.adv_options": ("adv_estimator", ESTIMATORS),
    "reward.options": ("function", REWARDS),
    "data.train.options": ("generator", GENERATORS),
}
"""Groups that are open: what chooses the plugin whose knobs they hold."""


@dataclass(frozen=True)
class FieldLine:
    path: str
    type: str
    default: str
    documentation: str
    read_by: str = ""
    """The plugin that has this knob; empty for a field that all have."""

    def matches(self, words: list[str]) -> bool:
        """Every word is a pattern of the path or of its last name, or occurs in path, plugin or documentation; none:
        all fields."""
        text = f"{self.path} {self.read_by} {self.documentation}".lower()
        names = self.path, self.path.rpartition(".")[2]
        return all(any(fnmatchcase(name, word) for name in names) or word.lower() in text for word in words)


def print_fields(filters: list[str], as_json: bool) -> int:
    """Those that match all filters. Raises ConfigError when there are none."""
    found = [line for line in all_fields() if line.matches(filters)]
    if not found:
        raise ConfigError(f"no field of the configuration matches {' '.join(filters)}; `mppo config` prints all")
    if as_json:
        print(json.dumps([asdict(line) for line in found], indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for line in found:
        reader = f"  ({line.read_by})" if line.read_by else ""
        console.print(f"{line.path}: {line.type} = {line.default}{reader}", markup=False, style="bold")
        for text in textwrap.wrap(line.documentation, 110):
            console.print(f"    {text}", markup=False)
    return 0


def all_fields() -> list[FieldLine]:
    """Of the typed configuration, then the knobs of plugins."""
    return [*_fields_of(Config, ""), *_knobs()]


def _knobs() -> Iterator[FieldLine]:
    for where, (chooser, registry) in KNOBS.items():
        for name in registry.names():
            yield from _fields_of(registry.get(name).config, f"{where}.", f"{chooser}={name}")
    yield from _fields_of(RolloutCorrectionConfig, "algorithm.rollout_correction.")


def _fields_of(schema: type, where: str, read_by: str = "") -> Iterator[FieldLine]:
    documented = _documentation(schema)
    for f in fields(schema):
        inner = dataclass_of(f.type)
        if inner is not None and not read_by:
            yield from _fields_of(inner, f"{where}{f.name}.")
        else:
            yield FieldLine(where + f.name, _type(f), _default(f), documented.get(f.name, ""), read_by)


def _type(f: Field) -> str:
    return f.type.__name__ if isinstance(f.type, type) and not get_args(f.type) else str(f.type).replace("typing.", "")


def _default(f: Field) -> str:
    value = f.default_factory() if f.default_factory is not MISSING else f.default
    return "(must be given)" if value is MISSING else json.dumps(value, default=str)


def _documentation(schema: type) -> dict[str, str]:
    """The texts under the fields of a dataclass and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            found |= _texts_under_fields(base)
    return found


def _texts_under_fields(schema: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _text(after):
            found[statement.target.id] = _text(after)
    return found


def _text(statement: ast.stmt) -> str:
    value: Any = getattr(getattr(statement, "value", None), "value", None)
    return " ".join(value.split()) if isinstance(statement, ast.Expr) and isinstance(value, str) else ""
