"""A real trainer and a real SGLang server, and what may be done to either."""

import base64
import pickle
import random
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.cli.compose import load_config
from mppo.config import Config
from mppo.mismatch.diagnosis import diagnose
from mppo.mismatch.evidence import Evidence
from mppo.mismatch.finding import Finding
from mppo.mismatch.gathering import Asking, BothSides
from mppo.mismatch.opening import open_sides, open_trainer, stand_alone
from mppo.mismatch.rescoring import TrainerSide
from mppo.mismatch.server_probe import ServerProbe
from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.engines.sglang.client import SglangClient
from mppo.rollout.prompts import Prompt
from mppo.weights.load import load
from mppo.weights.sources import RandomInitialisation

MODEL = {
    "vocab_size": 70,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "rope_parameters": "{rope_type: default, rope_theta: 23000.0}",
    "rms_norm_eps": 3e-6,
}
"""Tied, with a vocabulary that SGLang pads to 128, two query heads to a key/value head, several messages to a refit,
and a base and an epsilon that no search begins with."""
BASE = (
    "parallel=single",
    "rollout.engine=sglang",
    "rollout.sglang.transport=delta",
    "rollout.sglang.buffer_mb=1",
    "rollout.sglang.in_flight=in_place",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
)


@dataclass
class World:
    """One trainer, one server. Injections change it, and `heal` puts it right again."""

    sides: BothSides
    folder: Path
    overrides: Sequence[str]
    template: Prompt
    version: int = 0
    seeds: int = 0
    """The last that weights were drawn from."""
    prompts: dict[int, Prompt] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, overrides: Sequence[str]) -> "World":
        stand_alone()
        opened = open_sides(config_of(folder, overrides))
        world = cls(opened.sides, folder, overrides, opened.stream[0])
        world.prompts = world.draw_prompts(8, random.Random(0))
        for server in opened.sides.engine.refitter.conductor.servers:
            opened.sides.loop.run(server.ready(300.0))
        world.heal()
        return world

    @property
    def trainer(self) -> TrainerSide:
        return self.sides.trainer

    @property
    def client(self) -> SglangClient:
        return self.sides.probes[0].client

    def draw_prompts(self, count: int, draw: random.Random) -> dict[int, Prompt]:
        """Of random characters."""

        def ids() -> tuple[int, ...]:
            return tuple(draw.randrange(62) for _ in range(draw.randrange(6, 25)))

        return {number: replace(self.template, token_ids=ids()) for number in range(count)}

    def new_weights(self, seed: int | None = None) -> None:
        """Draw the trainer's weights anew."""
        self.seeds += 1
        model, trainer = self.trainer.model, self.trainer
        source = RandomInitialisation(model.hf_config, self.seeds if seed is None else seed)
        load(trainer.actor.chunks, model.architecture, model.config, source, trainer.topology)

    def refit(self, trainer: TrainerSide | None = None) -> None:
        """The weights under the next version."""
        self.version += 1
        sides = self.sides if trainer is None else replace(self.sides, trainer=trainer)
        sides.refit(self.version)
        self.sides.before = sides.before

    def heal(self) -> None:
        """Whole weights over new connections, whatever the server holds."""
        self.sides.engine.refitter.conductor.holds.clear()
        self.sides.loop.run(self.client.post("/flush_cache"))
        self.new_weights()
        self.refit()

    def diagnose(self, sides: BothSides | None = None, **asked: Any) -> tuple[list[Finding], Evidence]:
        """Real answers, scored by both sides."""
        hidden = asked.pop("hidden", False)
        version, prompts = asked.pop("version", self.version), asked.pop("prompts", self.prompts)
        sampling = SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **asked})
        evidence, rescorer = (sides or self.sides).gather(prompts, Asking(sampling, seed=self.version), version)
        if hidden:
            evidence = replace(evidence, servers=tuple(replace(server, model=None) for server in evidence.servers))
        return diagnose(evidence, rescorer), evidence

    def other_trainer(self, *overrides: str) -> TrainerSide:
        """Of another configuration, with the same drawn weights."""
        config = config_of(self.folder, (*self.overrides, *overrides))
        trainer, _ = open_trainer(config)
        source = RandomInitialisation(trainer.model.hf_config, self.seeds)
        load(trainer.actor.chunks, trainer.model.architecture, trainer.model.config, source, trainer.topology)
        return trainer

    def expected(self, name: str) -> Tensor:
        """A parameter of the server's worker, as the plan has it now."""
        return self.trainer.parameter(self.sides.target, f"0/{name}").clone()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Straight into the server's own parameters, by SGLang's own names."""
        payload = base64.b64encode(pickle.dumps(list(tensors.items()))).decode()
        body = {"serialized_named_tensors": [payload], "load_format": "direct", "flush_cache": False}
        self.post("/begin_weight_update", {"selector": "target"})
        self.post("/update_weights_from_tensor", body)
        self.post("/end_weight_update", {})

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        self.sides.loop.run(self.client.succeed(path, body))

    @contextmanager
    def client_that_asks(self, **changed: Any):
        """A way to the server on which sampling parameters are changed, unknown to both sides."""
        client = _Tampering(self.client.url, changed)
        try:
            yield replace(self.sides, probes=[ServerProbe(0, client, MODEL["vocab_size"])])
        finally:
            self.sides.loop.run(client.close())

    def close(self) -> None:
        self.sides.loop.run(self.sides.engine.close())
        self.sides.loop.close()


class _Tampering(SglangClient):
    def __init__(self, url: str, changed: Mapping[str, Any]):
        super().__init__(url)
        self.changed = changed

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        if path == "/generate" and body["sampling_params"]["max_new_tokens"]:
            body = {**body, "sampling_params": {**body["sampling_params"], **self.changed}}
        return await super().post(path, body, timeout_s)


def config_of(folder: Path, overrides: Sequence[str]) -> Config:
    options = ",".join(f"{name}: {str(value).lower()}" for name, value in MODEL.items())
    given = [f"model.preset_options={{{options}}}", f"trainer.out_dir={folder}"]
    return load_config("class", [*BASE, *given, *overrides])


def largest_difference(evidence: Evidence) -> float:
    """Of all scorings of a clean run, nats."""
    found = [0.0]
    for scored in evidence.trajectories:
        for x, y in ((scored.prefill, scored.reference), (scored.salted, scored.prefill)):
            found.append(float(torch.nan_to_num((x - y).abs()).max()))
    return max(found)
