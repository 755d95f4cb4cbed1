"""From configuration files and overrides to a typed Config, through Hydra."""

import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import mppo
from mppo.cli.moved_names import moved
from mppo.config import Config
from mppo.errors import ConfigError, alike_on_every_rank
from mppo.registry import nearest

SEARCH_PATH = "hydra.searchpath="


def default_config_dir() -> Path:
    """`configs/`: inside an installed package, or beside it in a checkout."""
    package = Path(mppo.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_config(config_name: str, overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose `config_name` with `overrides` (`actor.optim.lr=1e-5`, or a group: `model=smollm2`).

    Files and groups are looked for in `config_dir`, then in mppo's own. Raises ConfigError for a name, a field or a
    value that does not fit; an unknown field is named with its nearest, or with what it is called here.
    """
    with alike_on_every_rank():
        own = default_config_dir()
        folders = [Path(config_dir).resolve(), own] if config_dir else [own]
        values = _composed(config_name, _folder_of(config_name, folders), overrides, folders)
        _refuse_unknown(values, Config, "")
        return _typed(values)


def _folder_of(config_name: str, folders: list[Path]) -> Path:
    """The first that has it. Raises ConfigError where none has."""
    if not folders[0].is_dir():
        raise ConfigError(f"--config-dir: {folders[0]}: no such folder")
    for folder in folders:
        if (folder / _file_name(config_name)).is_file():
            return folder
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml") if path.is_file()})
    places = " and ".join(map(str, folders))
    raise ConfigError(
        f"--config-name {config_name}: no such file in {places}; there are {', '.join(known)}"
        f"{nearest(config_name, known)}"
    )


def _file_name(config_name: str) -> str:
    return f"{config_name.removesuffix('.yaml')}.yaml"


def _composed(config_name: str, first: Path, overrides: list[str], folders: list[Path]) -> dict[str, Any]:
    """Plain values. Raises ConfigError, on one line, for all that Hydra and OmegaConf refuse."""
    GlobalHydra.instance().clear()
    others = [folder for folder in folders if folder != first]
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(first), version_base="1.3"):
            # To Hydra it is no error.
            warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
            # Without it the file's own fields come last, as they should.
            warnings.filterwarnings("ignore", ".*Defaults list is missing `_self_`", UserWarning)
            given = [_addable(override, folders) for override in overrides if not override.startswith(SEARCH_PATH)]
            searched = _search_path(overrides, first / _file_name(config_name), others)
            composed = compose(config_name, overrides=[*searched, *given])
            return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        where = error.full_key or f"--config-name {config_name}"
        raise ConfigError(f"{where}: {_one_line(error)}") from error
    except Exception as error:  # Hydra lets those of YAML, its grammar and its plugins through
        where = getattr(error, "override", "").removeprefix("++") or f"--config-name {config_name}"
        said = ": ".join(_one_line(part) for part in (error, error.__cause__) if isinstance(part, Exception))
        raise ConfigError(f"{where}: {said}") from error


def _search_path(overrides: list[str], file: Path, folders: list[Path]) -> list[str]:
    """The override of Hydra's search path: what the command line says, or else the file, and these folders."""
    said = [
        override.removeprefix(SEARCH_PATH).strip("[]") for override in overrides if override.startswith(SEARCH_PATH)
    ]
    places = [*(said or _searched_by(file)), *(f"file://{folder}" for folder in folders)]
    return [f"{SEARCH_PATH}[{','.join(places)}]"] if places else []


def _searched_by(file: Path) -> list[str]:
    """The search path of the file itself, which that of an override would replace."""
    content = OmegaConf.load(file)
    places = OmegaConf.select(content, "hydra.searchpath") if OmegaConf.is_dict(content) else None
    return list(places or ())


def _addable(override: str, folders: list[Path]) -> str:
    """Let `a.b=c` set a field that no file mentions; whether it exists is checked against the typed configuration."""
    key = override.partition("=")[0]
    is_group = any((folder / key).is_dir() for folder in folders)
    is_special = key.startswith(("+", "~", "hydra.")) or "@" in key or "=" not in override
    return override if is_group or is_special else f"++{override}"


def _one_line(error: Exception) -> str:
    """What it says, without Hydra's list of where it looked, and OmegaConf's of where it was."""
    lines = []
    for line in str(error).splitlines():
        if line.strip().startswith(
            ("Config search path", "See https://", "full_key:", "object_type=", "reference_type=")
        ):
            break
        lines.append(line.strip())
    said = " ".join(line for line in lines if line)
    return said or type(error).__name__


def _typed(values: dict[str, Any]) -> Config:
    try:
        return cast(Config, _object_of(Config, values))
    except ConfigError as error:
        raise ConfigError(_owner(str(error), values) + str(error)) from error
    except OmegaConfBaseException as error:
        path = (error.full_key or "").partition("[")[0]
        raise ConfigError(f"{path} is {_shown(_at(values, path))}; it must be {_wanted(path)}") from error


def _owner(said: str, values: dict[str, Any]) -> str:
    """Of a group that several roles have, which names its fields by its own name (`optim.lr`): whose it is, `actor.`.

    It is the first that is refused with these words.
    """
    group = said.partition(".")[0]
    if group in {f.name for f in fields(Config)}:
        return ""
    for path in all_paths(Config, ""):
        owner, _, name = path.rpartition(".")
        given = _at(values, path) if name == group else None
        if given and _refusal(_schema_of(path), given) == said:
            return f"{owner}."
    return ""


def _refusal(schema: type, values: dict[str, Any]) -> str | None:
    """What a group says of its own values."""
    try:
        _object_of(schema, values)
    except ConfigError as error:
        return str(error)
    return None


def _object_of(schema: type, values: dict[str, Any]) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _refuse_unknown(values: Any, schema: type, where: str) -> None:
    """Raise ConfigError for a key that the dataclass does not have; plugin knobs (plain dicts) are checked later."""
    known = {f.name: f.type for f in fields(schema)}
    for key, value in values.items():
        path = f"{where}{key}"
        if key not in known:
            raise ConfigError(_unknown(path, value, known))
        inner = dataclass_of(known[key])
        if inner is None:
            _refuse_lax(path, value, known[key])
        elif isinstance(value, dict):
            _refuse_unknown(value, inner, f"{path}.")
        elif not (value is None and NoneType in get_args(known[key])):
            names = ", ".join(f.name for f in fields(inner))
            raise ConfigError(f"{path} is {_shown(value)}; it is a group of fields: {names}")


def _refuse_lax(path: str, value: Any, annotation: Any) -> None:
    """Raise ConfigError for what OmegaConf converts though it is none: an empty text, a number for true or false."""
    types = (annotation, *get_args(annotation))
    if bool in types and isinstance(value, int | float) and not isinstance(value, bool):
        raise ConfigError(f"{path} is {value}; it must be {in_words(annotation)}")
    if str in types and value == "":
        raise ConfigError(f"{path} is an empty text; give one, or unset it")
    if annotation == list[str] and isinstance(value, list) and "" in value:
        raise ConfigError(f"{path} has an empty text")


def _unknown(path: str, value: Any, known: dict[str, Any]) -> str:
    """What is said of a field that is not there."""
    for leaf in _leaves(path, value):
        if (here := moved(leaf)) is not None:
            return f"unknown field {leaf!r}; {here}"
    group, dot, name = path.rpartition(".")
    elsewhere = [p for p in all_paths(Config, "") if p.rpartition(".")[2] == name]
    hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else nearest(name, known, group + dot)
    return f"unknown field {path!r}{hint}"


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}", below)
    else:
        yield path


def all_paths(schema: type, where: str) -> list[str]:
    """Of all fields and groups of the typed configuration."""
    paths = []
    for f in fields(schema):
        inner = dataclass_of(f.type)
        paths.append(f"{where}{f.name}")
        if inner is not None:
            paths.extend(all_paths(inner, f"{where}{f.name}."))
    return paths


def dataclass_of(annotation: Any) -> type | None:
    """The group that a field of this type is; None where it is none."""
    candidates = (annotation, *get_args(annotation))
    return next((t for t in candidates if isinstance(t, type) and is_dataclass(t)), None)


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a mapping: {a: 1, b: 2}",
}


def _wanted(path: str) -> str:
    """What a field holds, in words."""
    group, _, name = path.rpartition(".")
    return in_words(next(f.type for f in fields(_schema_of(group)) if f.name == name))


def _schema_of(path: str) -> Any:
    """The dataclass of a group."""
    schema: Any = Config
    for name in path.split(".") if path else ():
        schema = dataclass_of(next(f.type for f in fields(schema) if f.name == name))
    return schema


def in_words(annotation: Any) -> str:
    """What a field of this type holds."""
    if get_origin(annotation) is list:
        return f"a list, each of it {WORDS[get_args(annotation)[0]]}: [a, b]"
    if get_origin(annotation) is dict:
        return WORDS[dict]
    options = get_args(annotation) or (annotation,)
    return " or ".join("null" if option is NoneType else WORDS.get(option, option.__name__) for option in options)


def _at(values: Any, path: str) -> Any:
    """None where it is not given."""
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
