"""From configuration files and overrides to a typed Config, through Hydra."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import mppo
from mppo.config import Config
from mppo.errors import ConfigError
from mppo.registry import nearest


def default_config_dir() -> Path:
    """`configs/`: inside an installed package, or beside it in a checkout."""
    package = Path(mppo.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_config(config_name: str, overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose `config_name` with `overrides` (`actor.optim.lr=1e-5`, or a group: `model=smollm2`).

    Raises ConfigError for a name, a field or a value that does not fit; an unknown field is named with its nearest.
    """
    folder = Path(config_dir).resolve() if config_dir else default_config_dir()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = compose(config_name, overrides=[_addable(o, folder) for o in overrides])
    except HydraException as error:
        raise ConfigError(f"{folder.name}/{config_name}: {error}") from error
    values = OmegaConf.to_container(composed, resolve=True)
    _refuse_unknown(values, Config, "")
    try:
        return cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values)))
    except OmegaConfBaseException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        raise ConfigError(f"{error.full_key or config_name}: {str(error).splitlines()[0]}") from error


def _addable(override: str, folder: Path) -> str:
    """Let `a.b=c` set a field that no file mentions; whether it exists is checked against the typed configuration."""
    key = override.partition("=")[0]
    is_group = (folder / key).is_dir()
    return override if is_group or key.startswith(("+", "~")) or "@" in key else f"++{override}"


def _refuse_unknown(values: Any, schema: type, where: str) -> None:
    """Raise ConfigError for a key that the dataclass does not have; plugin knobs (plain dicts) are checked later."""
    known = {f.name: f.type for f in fields(schema)}
    for key, value in values.items():
        path = f"{where}{key}"
        if key not in known:
            elsewhere = [p for p in _all_paths(Config, "") if p.rpartition(".")[2] == key]
            hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else nearest(str(key), known)
            raise ConfigError(f"unknown field {path!r}{hint}")
        inner = _dataclass_of(known[key])
        if inner is not None and isinstance(value, dict):
            _refuse_unknown(value, inner, f"{path}.")


def _all_paths(schema: type, where: str) -> list[str]:
    paths = []
    for f in fields(schema):
        inner = _dataclass_of(f.type)
        paths.append(f"{where}{f.name}")
        if inner is not None:
            paths.extend(_all_paths(inner, f"{where}{f.name}."))
    return paths


def _dataclass_of(annotation: Any) -> type | None:
    candidates = (annotation, *get_args(annotation))
    return next((t for t in candidates if isinstance(t, type) and is_dataclass(t)), None)
