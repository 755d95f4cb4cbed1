"""The ranks of `tests.bench.refit`: a TP2 x PP2 (x EP2) actor, and for each number of workers an SGLang server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from mppo.cli.compose import load_config
from mppo.config import Config
from mppo.megatron import topology
from mppo.megatron.topology import Topology
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.launching import sglang_engine
from mppo.weights.pretrained import PretrainedModel, open_model
from tests.bench.namespace import throttled
from tests.bench.processes import workers_of_server
from tests.bench.raw_send import RawSend
from tests.bench.refit_probe import Measured, Probe, change, least_bytes
from tests.bench.sglang_actor import actor_weights, servers_are_ready

RANKS = 4
PARALLEL = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.expert_model_parallel_size=2",
    "parallel.sequence_parallel=true",
)
DENSE = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
"""Layers of TinyLlama-1.1B."""
MOE = {
    "vocab_size": 8192, "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 128,
    "num_key_value_heads": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
}  # fmt: skip
"""Experts of the size of Qwen3-30B-A3B's; heads of the preset have 16 columns."""
MODELS = {"llama": ("char", DENSE), "qwen3-moe": ("char-moe", MOE)}
BYTES_OF_CHANGED = 6
"""Of a changed element in a delta: 2 of value, 4 of index."""


@dataclass(frozen=True)
class Settings:
    """Of all cases; what the launching process asks for, as JSON."""

    environment: str
    folder: str
    repeats: int
    mbit: int
    shares: dict[str, float]
    """By learning rate: of elements that change between two refits. The first is that of the throttled link."""
    models: list[str]
    workers: list[int]
    overrides: list[str]
    """Fields of the configuration, for all transports."""


@dataclass
class Case:
    """One transport into one server."""

    model: str
    workers: int
    transport: str
    model_bytes: int
    first_seconds: float = 0.0
    """With planning, connections and a comparison of checksums."""
    seconds: float = 0.0
    """Medians from here on."""
    transfer_seconds: float = 0.0
    raw_send_seconds: float | None = None
    link_bytes: int = 0
    received_over_minimum: float | None = None
    """The worst worker."""
    delta_bytes_over_changed: dict[str, float] = field(default_factory=dict)
    """By learning rate; the worst worker."""
    throttled_seconds: float | None = None
    """Of a refit over the slow link; of a delta with the first of the shares."""
    throttled_transfer_seconds: float | None = None
    rank_peak_bytes: int = 0
    """The most that a rank takes beside its part of the model, in refits without checksums; what a transport keeps
    between refits included. Of a worker the same."""
    worker_peak_bytes: int = 0
    rank_peak_bytes_with_checksums: int = 0


class Bench:
    """On each rank: all cases, one after the other."""

    def __init__(self, settings: Settings, place: Topology, progress: Progress):
        self.settings, self.place, self.progress = settings, place, progress
        self.task = progress.add_task("", total=len(settings.models) * len(settings.workers) * 5)
        self.raw, self.seed = RawSend(), 0
        self.cases: list[Case] = []

    def run(self) -> list[Case]:
        for name in self.settings.models:
            for workers in self.settings.workers:
                self._server(name, workers)
        self.raw.close()
        return self.cases

    def _server(self, name: str, workers: int) -> None:
        """All transports into one server, which the engine of the first launches."""
        self._say(f"{name}: an SGLang server of {workers} workers starts", advance=0)
        config = self._config(name, workers, "shards")
        model = open_model(config.model, seed=0)
        weights = actor_weights(config, model, self.place)
        size = sum(tensor.bytes for tensor in weights.layout.tensors.values())
        first = sglang_engine(config, model)
        pids: list[int] = []
        try:
            asyncio.get_event_loop().run_until_complete(servers_are_ready(first))
            dist.barrier()
            if first.refitter.conductor is not None:
                pids = workers_of_server(first.refitter.conductor.servers[0].process.pid)
            self._say()
            for transport in ("shards", "delta", "broadcast", "disk"):
                case = Case(name, workers, transport, size)
                self.cases.append(case)
                with self._engine(first, config, model, case) as engine:
                    self._measure(case, Probe(engine, weights, pids))
                self._say(f"{name} to {workers} by {transport}: {case.seconds:.3f} s")
        finally:
            asyncio.get_event_loop().run_until_complete(first.close())

    @contextmanager
    def _engine(
        self, first: SglangEngine, config: Config, model: PretrainedModel, case: Case
    ) -> Iterator[SglangEngine]:
        """That which launched the server, or one that attaches to it."""
        if case.transport == config.rollout.sglang.transport:
            yield first
            first.refitter.delivery.close()
            return
        url = first.fleet.members[0].client.url
        engine = sglang_engine(self._config(case.model, case.workers, case.transport, url), model)
        try:
            yield engine
        finally:
            asyncio.get_event_loop().run_until_complete(engine.close())

    def _config(self, name: str, workers: int, transport: str, url: str | None = None) -> Config:
        preset, sizes = MODELS[name]
        options = ", ".join(f"{field}: {value}" for field, value in sizes.items())
        own = self.settings
        fields = [
            f"model.preset={preset}", f"model.preset_options={{{options}}}", "model.dtype=bfloat16", *PARALLEL,
            "rollout.engine=sglang", f"rollout.sglang.environment={own.environment}",
            f"trainer.out_dir={own.folder}/{name}-{workers}", f"rollout.sglang.transport={transport}",
            f"rollout.sglang.tensor_parallel_size={workers}", "rollout.sglang.checksum_every=1000000",
        ]  # fmt: skip
        fields += self.settings.overrides
        if url is not None:
            fields.append(f"rollout.sglang.urls=[{url}]")
        if transport == "delta":
            fields.append("rollout.sglang.delta.full_every=0")
        return load_config("class", fields)

    def _measure(self, case: Case, probe: Probe) -> None:
        """Memory is that of refits alone, so what else needs some comes after them."""
        case.first_seconds = probe.refit().seconds
        case.rank_peak_bytes_with_checksums, _ = probe.peaks()
        if case.transport == "delta":
            self._measure_delta(case, probe)
            return
        probe.refit()
        case.rank_peak_bytes, case.worker_peak_bytes = probe.peaks()
        raw, refits = [], []
        link = self.raw.prepare(probe.delivery.route(0)) if case.transport == "shards" else None
        for repeat in range(self.settings.repeats + 1):
            if link is not None:
                raw.append(link.seconds())
            if repeat:  # the first raw send warms up
                refits.append(probe.refit())
        self._note(case, refits)
        if link is not None:
            case.raw_send_seconds = median(raw[1:])
            least = least_bytes(probe.delivery.target)
            case.received_over_minimum = max(m.received[w] / least[w] for m in refits for w in least)
            link.close()
            self._throttled(case, probe)

    def _measure_delta(self, case: Case, probe: Probe) -> None:
        refits: list[Measured] = []
        for number, (lr, share) in enumerate(self.settings.shares.items()):
            for _ in range(1 if number else self.settings.repeats):
                expected = self._change(probe, share)
                found = probe.refit()
                worst = max(found.received[w] / (BYTES_OF_CHANGED * expected[w]) for w in expected)
                case.delta_bytes_over_changed[lr] = max(worst, case.delta_bytes_over_changed.get(lr, 0.0))
                if number == 0:
                    refits.append(found)
        case.rank_peak_bytes, case.worker_peak_bytes = probe.peaks()
        self._note(case, refits)
        self._change(probe, next(iter(self.settings.shares.values())))
        self._throttled(case, probe)

    def _change(self, probe: Probe, share: float) -> dict[int, int]:
        self.seed += 1
        return change(probe.weights, share, probe.delivery.route(0), self.seed)

    def _note(self, case: Case, refits: list[Measured]) -> None:
        case.seconds = median(m.seconds for m in refits)
        case.transfer_seconds = median(m.transfer_seconds for m in refits)
        case.link_bytes = int(median(m.link_bytes for m in refits))

    def _throttled(self, case: Case, probe: Probe) -> None:
        self._say(f"{case.model} to {case.workers} by {case.transport} at {self.settings.mbit} Mbit/s", advance=0)
        with self._slow_link():
            found = probe.refit()
        case.throttled_seconds, case.throttled_transfer_seconds = found.seconds, found.transfer_seconds

    @contextmanager
    def _slow_link(self) -> Iterator[None]:
        dist.barrier()
        if dist.get_rank() > 0:
            yield
            return
        with throttled(self.settings.mbit):
            yield

    def _say(self, what: str | None = None, advance: int = 1) -> None:
        described = {} if what is None else {"description": what}
        self.progress.update(self.task, advance=advance, **described)


def work(settings: Settings, result: Path) -> None:
    """One of the processes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    place = topology.initialize(load_config("class", list(PARALLEL)).parallel, seed=1)
    console = Console(stderr=True, quiet=dist.get_rank() > 0)
    with Progress(console=console, disable=dist.get_rank() > 0) as progress:
        cases = Bench(settings, place, progress).run()
    if dist.get_rank() == 0:
        found: list[dict[str, Any]] = [asdict(case) for case in cases]
        result.write_text(json.dumps(found, indent=2) + "\n")
    topology.shutdown()
    loop.close()
