"""What the tests of this folder do on the ranks of a trainer, with real servers."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from mppo.cli.compose import load_config
from mppo.config import Config
from mppo.megatron.collectives import gather_from_all
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.launching import sglang_engine
from mppo.trainer.assemble import assemble
from mppo.trainer.run import Run
from mppo.trainer.trainer import Trainer
from mppo.weights.export import export_hf

ALL_THREADS = _ExperimentalConfig(profile_all_threads=True)
SMALL = (
    "rollout=sglang",
    "actor.old_log_prob_pass=always",
    "data.train_batch_size=8",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=8",
    "data.val.generator=null",
    "data.val.options={}",
    "trainer.test_freq=0",
    "trainer.save_hf=false",
    "rollout.sglang.checksum_every=1",
)


def small_config(environment: Path, out_dir: Path, *overrides: str) -> Config:
    places = (f"rollout.sglang.environment={environment}", f"trainer.out_dir={out_dir}")
    return load_config("class", [*SMALL, *places, *overrides])


def agreement(environment: Path, out_dir: Path, folder: Path, tp: int) -> float:
    """The largest difference of log-probs between the server that wrote answers and the trainer, in a step's batch."""
    overrides = (f"model.path={folder}", "model.preset=null", "model.preset_options={}", "model.dtype=float32")
    overrides += ("parallel.sequence_parallel=true",)  # which Megatron-core wants for experts
    run = assemble(small_config(environment, out_dir, *overrides, f"rollout.sglang.tensor_parallel_size={tp}"))
    trainer = Trainer(run)
    try:
        trainer.sync_weights()
        batch = trainer.old_log_probs(trainer.balance(trainer.reward(trainer.sample())))
        old, rollout = batch.packed["old_log_probs"], batch.packed["rollout_log_probs"]
        differences = (old - rollout).abs()[batch.packed.mask]
        assert len(differences) and differences.isfinite().all()
        return max(gather_from_all(differences.max().item()))
    finally:
        run.rollouts.collector.close()


class Held:
    """What the workers of a server hold: checksums of every parameter, by stock SGLang."""

    def __init__(self, run: Run, engine: SglangEngine):
        self.run, self.client = run, engine.fleet.members[0].client

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        return self.run.rollouts.collector.loop.run(self.client.post(path, body, 120.0))

    def checksums(self) -> dict[str, str]:
        answer = self.ask("/weights_checker", {"action": "checksum"})
        return {
            f"{worker['parallelism_info'][0]['tp_rank']}/{name}": value
            for worker in answer["ranks"]
            for name, value in worker["checksums"].items()
        }

    def of_folder(self, folder: Path) -> dict[str, str]:
        """Once SGLang's own loader has read a folder."""
        self.ask("/update_weights_from_disk", {"model_path": str(folder), "load_format": "auto"})
        return self.checksums()

    def spoil(self) -> None:
        self.ask("/weights_checker", {"action": "reset_tensors"})


def transports(environment: Path, out_dir: Path) -> dict[str, Any]:
    """Every transport in turn to one server of two workers, each compared with a freshly loaded folder."""
    own = ("rollout.sglang.tensor_parallel_size=2", "model.dtype=bfloat16")
    run = assemble(small_config(environment, out_dir, *own))
    first, found = run.rollouts.collector.engine, {}
    try:
        update(run, first, 0)
        url, held = first.fleet.members[0].client.url, Held(run, first)
        for number, transport in enumerate(("shards", "handles", "broadcast", "disk", "delta"), start=1):
            named = "shards" if transport == "handles" else transport
            config = small_config(environment, out_dir / transport, *own, f"rollout.sglang.transport={named}")
            config.rollout.sglang.urls = [url]
            config.rollout.sglang.delta.full_every = 0
            engine = sglang_engine(config, run.model)
            if transport == "handles":  # as with GPUs that are shared; here it is memory of the host
                torch.multiprocessing.set_sharing_strategy("file_system")
                engine.refitter.delivery.handles = True
            found[transport] = transported(run, engine, held, out_dir / "fresh", version=100 * number)
            if transport == "delta":
                found["deltas"] = deltas(run, engine, held, out_dir / "fresh")
            run.rollouts.collector.loop.run(engine.close())
    finally:
        run.rollouts.collector.close()
    return found


def update(run: Run, engine: SglangEngine, version: int) -> None:
    run.rollouts.collector.loop.run(engine.update_weights(run.rollouts.weights, version))


def change(run: Run, every: int, factor: float) -> None:
    """Of each parameter every so many entries; alike on ranks that hold the same."""
    for tensor in run.rollouts.weights.tensors.values():
        flat = tensor.data.view(-1)
        flat[::every] = flat[::every] * factor + 0.01


def transported(run: Run, engine: SglangEngine, held: Held, folder: Path, version: int) -> dict[str, Any]:
    """Whether new weights arrive where others were, and the communication of a second refit."""
    change(run, 1, 1.1)
    if dist.get_rank() == 0:
        held.spoil()
    dist.barrier()
    update(run, engine, version)
    change(run, 3, 1.1)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as profiler:
        update(run, engine, version + 1)
    live = held.checksums() if dist.get_rank() == 0 else {}
    return {
        "communication": sorted({e.name for e in profiler.events() if e.name.startswith(("gloo:", "c10d::"))}),
        "version": engine.fleet.members[0].version,
        **compared(run, held, folder, live),
    }


def compared(run: Run, held: Held, folder: Path, live: dict[str, str]) -> dict[str, Any]:
    """What the first rank's server held against what it holds once it has loaded these weights from a folder."""
    export_hf(run.rollouts.weights, run.model, folder)
    dist.barrier()
    fresh = held.of_folder(folder) if dist.get_rank() == 0 else {}
    odd = sorted(name for name in live.keys() | fresh.keys() if live.get(name) != fresh.get(name))
    return {"parameters": len(live), "odd": odd}


def deltas(run: Run, engine: SglangEngine, held: Held, folder: Path) -> dict[str, Any]:
    """Fifty of them, one after another, of which no other refit is in between."""
    received, changed = 0, 0
    for number in range(50):
        change(run, 50 + number, 1.3)
        update(run, engine, 1000 + number)
        received += sum(engine.refitter.delivery.received.values())
        changed += engine.refitter.delivery.traffic.changed
    live = held.checksums() if dist.get_rank() == 0 else {}
    return {
        "received": received,
        "changed": sum(gather_from_all(changed)),
        **compared(run, held, folder, live),
    }
