"""Loads Hugging Face folders into Megatron chunks, exports them back and saves them; runs on every rank."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mppo.config import ModelSource, ParallelConfig
from mppo.errors import ModelError
from mppo.megatron import topology as layouts
from mppo.megatron.collectives import gather_from_all
from mppo.megatron.model import build_chunks
from mppo.megatron.topology import Topology
from mppo.weights.pretrained import PretrainedModel, open_model
from mppo.weights.transfer import Exporter, load, save_hf
from tests.distributed.hook_cases import EXPERT_LAYOUTS, LAYOUTS
from tests.distributed.model_folders import EXPERT_MODELS, REWARD_MODELS

ROUND_TRIPS = ("tp2-pp2-sp", "tp2-pp2-vpp2-sp")
EXPERT_ROUND_TRIPS = ("tp2-pp2-ep2-sp", "pp2-vpp2-ep2-dp2", "cp2-ep4-dp2")
"""Only for mixtures of experts."""


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

    def exporter(self, model: PretrainedModel, value_head: bool, zero_value_head: bool = False) -> Exporter:
        chunks = self.load(model, value_head, zero_value_head)
        return Exporter(chunks, model.architecture, model.config, self.topology, value_head=value_head)

    def round_trip(self, folder: Path, saved: Path) -> list[str]:
        """Save the model, and name the tensors that are not exactly those of its folder."""
        model = opened(folder)
        exporter = self.exporter(model, value_head=folder.name in REWARD_MODELS)
        save_hf(exporter, model.hf_config, model.tokenizer, str(saved))
        return differences(dict(exporter.export()), load_file(folder / "model.safetensors"))

    def fresh_critic(self, folder: Path) -> list[str]:
        """A critic from an actor's or a reward model's folder with its head at zero; names what is otherwise."""
        expected = load_file(folder / "model.safetensors")
        expected.pop("lm_head.weight", None)
        expected["score.weight"] = torch.zeros(1, expected["model.norm.weight"].numel())
        exporter = self.exporter(opened(folder), value_head=True, zero_value_head=True)
        return differences(dict(exporter.export()), expected)

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
                differing = place.round_trip(folder, saved / layout / folder.name)
                found[f"{layout}/{folder.name}"] = gather_from_all(differing)
        for name in ("llama", "llama-tied", "reward"):
            found[f"{layout}/{name}/critic"] = gather_from_all(place.fresh_critic(models / name))
        layouts.parallel_state.destroy_model_parallel()
    for layout in EXPERT_ROUND_TRIPS:
        place = Place(layout)
        for name in EXPERT_MODELS:
            differing = place.round_trip(models / name, saved / layout / name)
            found[f"{layout}/{name}"] = gather_from_all(differing)
        layouts.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found
