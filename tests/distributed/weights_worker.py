"""Loads Hugging Face folders into Megatron chunks, exports them back and saves them; runs on every rank."""

import asyncio
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from mppo.config import ModelSource, ParallelConfig
from mppo.errors import ModelError
from mppo.megatron import topology as layouts
from mppo.megatron.collectives import gather_from_all
from mppo.megatron.model import build_chunks
from mppo.megatron.topology import Topology
from mppo.rollout.engines.local import LocalEngine
from mppo.weights.export import export_hf
from mppo.weights.fused import on_disk
from mppo.weights.live_weights import LiveWeights
from mppo.weights.load import load
from mppo.weights.pretrained import PretrainedModel, open_model
from mppo.weights.transfer_plan import whole_tensors
from mppo.weights.transports.point_to_point import PointToPoint
from tests.distributed.hook_cases import EXPERT_LAYOUTS, LAYOUTS
from tests.distributed.model_folders import EXPERT_MODELS, REWARD_MODELS
from tests.distributed.whole_model import whole_copy

ROUND_TRIPS = ("tp2-pp2-sp", "tp2-pp2-vpp2-sp")
EXPERT_ROUND_TRIPS = ("tp2-pp2-ep2-sp", "pp2-vpp2-ep2-dp2", "cp2-ep4-dp2")
"""Only for mixtures of experts."""
SEVERAL_FILES, SEVERAL_FILES_BYTES = "several-files", 60_000


class Place:
    """One layout, and what can be done with a model folder there."""

    def __init__(self, layout: str):
        self.parallel: ParallelConfig = (LAYOUTS | EXPERT_LAYOUTS)[layout][1]
        self.topology: Topology = layouts.initialize(self.parallel, seed=1)

    def load(self, model: PretrainedModel, value_head: bool, zero_value_head: bool = False) -> list[torch.nn.Module]:
        chunks = build_chunks(model.config, self.parallel, model.dtype, value_head=value_head)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(torch.nan)  # so that what is not loaded shows
        load(
            chunks,
            model.architecture,
            model.config,
            model.source,
            self.topology,
            value_head=value_head,
            zero_value_head=zero_value_head,
        )
        return chunks

    def weights(self, model: PretrainedModel, value_head: bool, zero_value_head: bool = False) -> LiveWeights:
        chunks = self.load(model, value_head, zero_value_head)
        return LiveWeights.of_chunks(chunks, model.architecture, model.config, self.topology, value_head=value_head)

    def round_trip(self, folder: Path, saved: Path) -> list[str]:
        """Save the model, and name the tensors of a whole copy that are not exactly those of its folder."""
        model = opened(folder)
        weights = self.weights(model, value_head=folder.name in REWARD_MODELS)
        export_hf(weights, model, saved / folder.name)
        export_hf(weights, model, saved / SEVERAL_FILES / folder.name, largest_file=SEVERAL_FILES_BYTES)
        return differences(whole_copy(weights), load_file(folder / "model.safetensors"))

    def fresh_critic(self, folder: Path) -> list[str]:
        """A critic from an actor's or a reward model's folder with its head at zero; names what is otherwise."""
        expected = load_file(folder / "model.safetensors")
        expected.pop("lm_head.weight", None)
        expected["score.weight"] = torch.zeros(1, expected["model.norm.weight"].numel())
        return differences(whole_copy(self.weights(opened(folder), value_head=True, zero_value_head=True)), expected)

    def local_engine(self, folder: Path) -> dict[str, list[str]]:
        """What an engine holds after an update that is otherwise than the folder, and the communication of one."""
        model = opened(folder)
        weights = self.weights(model, value_head=False)
        engine = LocalEngine(
            model.hf_config, model.tokenizer, model.end_tokens, model.dtype, torch.device("cpu"), batch_size=1
        )
        engine.transport = PointToPoint(bucket_bytes=10_000)
        asyncio.run(engine.update_weights(weights, version=1))
        held = dict(on_disk(engine.model.named_parameters()))
        target = engine.target
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            asyncio.run(engine.update_weights(weights, version=2))
        used = {e.name for e in profiler.events() if e.name.startswith("gloo:")}
        return {
            "differing": differences(held, load_file(folder / "model.safetensors")),
            "collectives": sorted(used - {"gloo:send", "gloo:recv", "gloo:all_reduce"}),
            "messages": sorted(used & {"gloo:send", "gloo:recv"}),
            "plans": ["made again"] * (engine.target is not target),
        }

    def refused_targets(self, folder: Path) -> str:
        """What is said when one rank brings a target that is too small."""
        weights = self.weights(opened(folder), value_head=False)
        tensors = weights.layout.tensors
        target = whole_tensors(tensors, {0: ["model.norm.weight"]})
        short = {"model.norm.weight": torch.zeros(3)}
        try:
            PointToPoint().run(weights.plan_for(target), weights, short)
        except ModelError as error:
            return str(error)
        return ""

    def unwritable(self, folder: Path, blocked: Path) -> str:
        """What is said when the folder cannot be made."""
        model = opened(folder)
        try:
            export_hf(self.weights(model, value_head=False), model, blocked / "hf")
        except ModelError as error:
            return str(error)
        return ""

    def refusal(self, folder: Path) -> str:
        """What the ModelError of a load says; empty on a rank that holds nothing of what is wrong."""
        try:
            self.load(opened(folder), value_head="reward" in folder.name)
        except ModelError as error:
            return str(error)
        return ""


def opened(folder: Path) -> PretrainedModel:
    dtype = "bfloat16" if "bfloat16" in folder.name else "float32"
    return open_model(ModelSource(path=str(folder), dtype=dtype, make_vocab_size_divisible_by=8), seed=1)


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names on one side only, and names of tensors that differ in dtype or in any entry."""
    both = found.keys() & expected.keys()
    unequal = {n for n in both if found[n].dtype != expected[n].dtype or not torch.equal(found[n], expected[n])}
    return sorted(unequal | found.keys() ^ expected.keys())


def round_trips(models: Path, saved: Path) -> dict[str, list]:
    """By layout and folder, the tensors that differ or the refusal on each rank."""
    found: dict[str, list] = {}
    for layout in ROUND_TRIPS:
        place = Place(layout)
        for folder in sorted(models.iterdir()):
            if folder.name.startswith("broken"):
                found[f"{layout}/{folder.name}"] = gather_from_all(place.refusal(folder))
            else:
                differing = place.round_trip(folder, saved / layout)
                found[f"{layout}/{folder.name}"] = gather_from_all(differing)
        for name in ("llama", "llama-tied", "reward"):
            found[f"{layout}/{name}/critic"] = gather_from_all(place.fresh_critic(models / name))
        for name in ("llama-tied", "qwen2"):
            found[f"{layout}/{name}/engine"] = gather_from_all(place.local_engine(models / name))
        found[f"{layout}/target"] = gather_from_all(place.refused_targets(models / "llama"))
        blocked = saved / "a-file"
        blocked.touch()
        found[f"{layout}/unwritable"] = gather_from_all(place.unwritable(models / "llama", blocked))
        layouts.parallel_state.destroy_model_parallel()
    for layout in EXPERT_ROUND_TRIPS:
        place = Place(layout)
        for name in EXPERT_MODELS:
            differing = place.round_trip(models / name, saved / layout)
            found[f"{layout}/{name}"] = gather_from_all(differing)
        found[f"{layout}/qwen3-moe/engine"] = gather_from_all(place.local_engine(models / "qwen3-moe"))
        layouts.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
