"""The baseline of a refit: the same bytes, from as many processes to as many others, by nothing but gloo's send.

The trainer's ranks send; the receivers are processes of this module (`python -m tests.bench.raw_send RANK PORT`), which
hold buffers that are allocated and touched beforehand and throw away what comes. One message for each pair of
processes: nothing is packed, nothing is written anywhere.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist

from mppo.megatron import platform
from mppo.megatron.collectives import gather_from_all
from mppo.weights.transports.routes import Route

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=120)
GO, END = "go", "end"


@dataclass
class RawSend:
    """On each rank of the trainer. The first starts the receivers, and serves the store by which all meet."""

    receivers: list[subprocess.Popen] = field(default_factory=list)
    orders: int = 0

    def __post_init__(self):
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
        port = gather_from_all(store.port if store else 0)[0]
        self.store = store or dist.TCPStore(HOST, port, is_master=False)
        self.port = port

    def start_receivers(self, workers: int) -> None:
        """Until there are so many."""
        if dist.get_rank() == 0:
            for number in range(len(self.receivers), workers):
                command = [sys.executable, "-m", "tests.bench.raw_send", str(number), str(self.port)]
                self.receivers.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))

    def prepare(self, route: Route) -> "RawLink":
        """Collective: connections and buffers for what a route has for each pair."""
        self.start_receivers(route.workers)
        loads = [[0] * route.workers for _ in route.senders]
        for messages in route.rounds:
            for message in messages:
                loads[route.place(message.source)][message.worker.tp_rank] += message.bytes
        if dist.get_rank() == 0:
            self.store.set(f"order/{self.orders}", json.dumps(loads))
        self.orders += 1
        return RawLink(self.store, self.orders - 1, loads, route.senders.index(dist.get_rank()))

    def close(self) -> None:
        if dist.get_rank() == 0:
            self.store.set(f"order/{self.orders}", json.dumps(END))
            for receiver in self.receivers:
                receiver.wait(30)


class RawLink:
    """One end of the connections of an order: of a sender, or of a receiver."""

    def __init__(self, store: dist.Store, order: int, loads: list[list[int]], place: int):
        """`loads[sender][worker]` in bytes. Senders are the group's first ranks, as in a `Route`."""
        self.store, self.order, self.repeat = store, order, 0
        senders, workers = len(loads), len(loads[0])
        self.senders, self.workers, self.worker = senders, workers, place - senders
        met = dist.PrefixStore(f"group/{order}", store)
        self.group = platform.outside_group(met, place, senders + workers, TIMEOUT, HOST)
        sizes = loads[place] if place < senders else [of_sender[self.worker] for of_sender in loads]
        self.buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]

    def seconds(self) -> float:
        """Collective, on the senders: from the first that begins to the last receiver that has it all."""
        key = self._next()
        dist.barrier()
        start = monotonic()
        if dist.get_rank() == 0:
            self.store.set(key, GO)
        sends = [self.group.send([b], self.senders + w, 0) for w, b in enumerate(self.buffers) if len(b)]
        for send in sends:
            send.wait(TIMEOUT)
        ends = [float(self.store.get(f"{key}/end/{worker}")) for worker in range(self.workers)]
        return max(ends) - min(gather_from_all(start))

    def receive(self) -> None:
        """On a receiver, as often as it is asked."""
        key = self._next()
        while self.store.get(key).decode() == GO:
            receives = [self.group.recv([b], sender, 0) for sender, b in enumerate(self.buffers) if len(b)]
            for receive in receives:
                receive.wait(TIMEOUT)
            self.store.set(f"{key}/end/{self.worker}", str(monotonic()))
            key = self._next()

    def _next(self) -> str:
        """Where the first sender says whether there is one more repeat."""
        self.repeat += 1
        return f"raw/{self.order}/{self.repeat}"

    def close(self) -> None:
        """On the senders; the receivers go on to the next order."""
        if dist.get_rank() == 0:
            self.store.set(self._next(), END)
        self.group.abort()


def main() -> None:
    """A receiver."""
    number, port = int(sys.argv[1]), int(sys.argv[2])
    store, order = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(hours=1)), 0
    while (loads := json.loads(store.get(f"order/{order}"))) != END:
        if number < len(loads[0]):
            RawLink(store, order, loads, len(loads) + number).receive()
        order += 1


if __name__ == "__main__":
    main()
