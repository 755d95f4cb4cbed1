"""Rows of prompt files and generators. Files stay on disk and are mapped: JSON lines as they are, Parquet as Arrow."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from mppo.config import PromptSource
from mppo.errors import DataError
from mppo.rollout.json_lines import JsonLines
from mppo.rollout.tasks import GENERATORS

Row = dict[str, Any]
Table: TypeAlias = Dataset | Sequence[Row]
FORMATS = (".jsonl", ".json", ".parquet")


class Rows:
    """The rows of several tables, numbered through. Tables need not have the same fields."""

    def __init__(self, tables: Sequence[Table]):
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Row:
        which = bisect_right(self._ends, number)
        return self._tables[which][number - self._ends[which]]  # from the end of the table

    def columns(self, keys: tuple[str, ...], size: int) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
        """What `look_up` finds under each of `keys`, `size` rows at a time, each with its first row's number."""
        for table, end in zip(self._tables, self._ends, strict=True):
            for start in range(0, len(table), size):
                yield end - len(table) + start, _values(table, keys, start, min(start + size, len(table)))


def read_rows(source: PromptSource, where: str) -> Rows:
    """The rows of a source; `where` is its place in the configuration.

    Raises DataError for a source that is neither files nor a generator, and a file that is missing or unreadable;
    ConfigError for a generator or an option of it that is unknown.
    """
    if bool(source.files) == bool(source.generator):
        raise DataError(f"{where}: give either files or a generator")
    if source.generator:
        return Rows([GENERATORS.get(source.generator).bind(source.options, f"{where}.options")()])
    if source.options:
        raise DataError(f"{where}.options has no effect with files")
    return Rows([_read(Path(file), where) for file in source.files])


def look_up(row: Mapping[str, Any], key: str) -> Any:
    """What a row has under a name, or under a path of names with dots between; None where it has nothing."""
    if key in row:
        return row[key]
    first, dot, rest = key.partition(".")
    below = row.get(first)
    return look_up(below, rest) if dot and isinstance(below, Mapping) else None


def _values(table: Table, keys: tuple[str, ...], start: int, stop: int) -> list[tuple[Any, ...]]:
    if isinstance(table, Dataset):  # other columns are not even read
        wanted = {name for key in keys for name in (key, key.partition(".")[0]) if name in table.column_names}
        rows = table.select_columns(sorted(wanted)).select(range(start, stop)) if wanted else [{}] * (stop - start)
    else:
        rows = table[start:stop]
    return [tuple(look_up(row, key) for key in keys) for row in rows]


def _read(file: Path, where: str) -> Table:
    if not file.is_file():
        raise DataError(f"{where}.files: {file}: no such file")
    if file.suffix not in FORMATS:
        raise DataError(f"{where}.files: {file}: the name must end with {', '.join(FORMATS)}")
    if not file.stat().st_size:
        return []
    if file.suffix == ".parquet":
        try:
            return load_dataset("parquet", data_files=str(file), split="train")
        except (DatasetGenerationError, ValueError) as error:
            raise DataError(f"{where}.files: {file} cannot be read: {error.__cause__ or error}") from error
    lines = JsonLines(file, f"{where}.files: {file}")
    return lines.whole() if file.suffix == ".json" and lines.starts_with("[") else lines
