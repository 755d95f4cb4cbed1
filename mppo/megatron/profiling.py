"""Named ranges round each micro-batch's forward and backward, through the timers that Megatron's schedules call."""

from contextlib import AbstractContextManager

from mppo.megatron import platform

_SHOWN = ("forward-compute", "backward-compute", "forward-backward")


class _Range:
    def __init__(self, name: str):
        self.name = name
        self.open: list[AbstractContextManager] = []

    def start(self, barrier: bool = False) -> None:
        self.open.append(platform.named_range(self.name))
        self.open[-1].__enter__()

    def stop(self, barrier: bool = False) -> None:
        self.open.pop().__exit__(None, None, None)


class _Nothing:
    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class RangeTimers:
    """Has the interface of Megatron's timers: `timers(name, log_level=...).start()`, `timers(name).stop()`."""

    def __init__(self):
        self._ranges = {name: _Range(name) for name in _SHOWN}
        self._nothing = _Nothing()

    def __call__(self, name: str, log_level: int = 0):
        return self._ranges.get(name, self._nothing)
