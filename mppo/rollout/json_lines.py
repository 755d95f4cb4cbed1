"""A file with a JSON object on each line, read from disk when a line is looked at."""

import json
import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mppo.errors import DataError

BOM = b"\xef\xbb\xbf"


class JsonLines(Sequence[dict[str, Any]]):
    """Its rows, each as Python's json reads it by itself: no field takes on the type of another row's.

    Blank lines are left out. Every DataError names the file and the line.
    """

    def __init__(self, path: Path, where: str):
        """`where` names the file in errors. It must not be empty."""
        self.where = where
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._numbers = array("q"), array("q")
        """Of each row: where it begins, and its line, counted from 1."""
        self._find_rows()

    def _find_rows(self) -> None:
        start = len(BOM) if self._bytes[: len(BOM)] == BOM else 0
        number, size = 1, len(self._bytes)
        while start < size:
            end = self._bytes.find(b"\n", start)
            end = size if end < 0 else end
            if self._bytes[start:end].strip():
                self._starts.append(start)
                self._numbers.append(number)
            start, number = end + 1, number + 1

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start = self._starts[index]
        end = self._bytes.find(b"\n", start)
        where = f"{self.where}, line {self._numbers[index]}"
        return _row(_parsed(self._bytes[start : len(self._bytes) if end < 0 else end], where), where)

    def starts_with(self, character: str) -> bool:
        """Whether that is the first character that is no blank."""
        if not self._starts:
            return False
        start = self._starts[0]
        return self._bytes[start : start + 100].lstrip().startswith(character.encode())

    def whole(self) -> list[dict[str, Any]]:
        """The rows of a file that is one JSON list."""
        rows = _parsed(self._bytes[self._starts[0] :], self.where)
        if not isinstance(rows, list):
            raise DataError(f"{self.where}: it holds a {type(rows).__name__}, not a list of rows")
        return [_row(row, f"{self.where}, row {number}") for number, row in enumerate(rows)]


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} cannot be read: it is no JSON in UTF-8: {error}") from error


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} holds a {type(value).__name__}; a row is a JSON object: {{...}}")
    return value
