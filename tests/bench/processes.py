"""Memory of processes, from /proc: this one's and those of a server."""

import ctypes
from dataclasses import dataclass
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Processes that a process made, and those that these made."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [below for child in found for below in descendants(child)]


def workers_of_server(pid: int) -> list[int]:
    """The processes of an SGLang server that hold the model, one for each tensor-parallel rank."""
    return [child for child in descendants(pid) if b"sglang::scheduler" in Path(f"/proc/{child}/cmdline").read_bytes()]


@dataclass
class Memory:
    """What a process takes beyond what it had at first, at the most: VmHWM, which counts pages of files it maps too."""

    pid: int
    resident: int = 0

    def __post_init__(self):
        self.resident = self._read("VmRSS")
        self.forget_peak()

    def forget_peak(self) -> None:
        """What was given back by now counts no more."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Since the peak was forgotten, beyond what it had when this was made."""
        return self._read("VmHWM") - self.resident

    def _read(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def return_freed_memory() -> None:
    """To the kernel, so that memory that was freed before a measurement does not hide what it takes."""
    ctypes.CDLL(None).malloc_trim(0)
