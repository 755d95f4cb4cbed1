"""Where ranks and workers stand, and how fast the links between them are: assumptions, all of them options."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mppo.errors import ConfigError
from mppo.weights.sglang_layout import Worker

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Links:
    """Line rates in each direction, and the size of a machine. Each GPU has a network card and NVLink of its own.

    Raises ConfigError for what is not greater than 0.
    """

    nic_gbit: float = 400.0
    """Gbit/s of the card of one GPU."""
    nvlink_gbyte: float = 450.0
    """GB/s (10^9 bytes) of one GPU within a machine."""
    gpus_per_machine: int = 8

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be a number greater than 0")

    def between_s(self, size: int) -> float:
        """Seconds that so many bytes take from or to one GPU, over its network card."""
        return size / (self.nic_gbit * 1e9 / 8)

    def within_s(self, size: int) -> float:
        """The same within a machine."""
        return size / (self.nvlink_gbyte * 1e9)


@dataclass(frozen=True)
class Machines:
    """The machine of every trainer rank and of every worker, by names that are equal on the same machine."""

    of_rank: Sequence[Hashable]
    of_worker: dict[Worker, Hashable]

    def is_within(self, source: int, target: Any) -> bool:
        return self.of_rank[source] == self.of_worker[target]


def place(ranks: int, servers: int, workers: int, urls: Sequence[str], gpus: int) -> Machines:
    """Ranks fill machines of `gpus` in order, and so do the workers of servers that are launched.

    Servers of `urls` are on the hosts that they name, one that is larger than a machine on as many more.
    """
    trainer = [("trainer", rank // gpus) for rank in range(ranks)]
    machines = -(-ranks // gpus)
    of_worker: dict[Worker, Hashable] = {}
    for number in range(servers * workers):
        worker = Worker(*divmod(number, workers))
        if urls:
            of_worker[worker] = _machine_of(urls[worker.server], worker.tp_rank // gpus)
        else:
            of_worker[worker] = ("trainer", number // gpus % machines)
    return Machines(trainer, of_worker)


def _machine_of(url: str, number: int) -> Hashable:
    host = urlsplit(url).hostname
    return ("trainer", number) if host in LOOPBACK else (host, number)


def in_words(urls: Sequence[str], ranks: int, gpus: int) -> str:
    """Where servers are taken to stand."""
    if not urls:
        alone = "" if ranks <= gpus else "; mppo itself launches them for the ranks of one machine only, else give urls"
        return f"on the trainer's machines, beside the ranks{alone}"
    if all(urlsplit(url).hostname in LOOPBACK for url in urls):
        return "on the trainer's first machine (urls of this machine)"
    return "on machines of their own, one for each host of rollout.sglang.urls"
