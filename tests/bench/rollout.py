"""What mppo's client costs: `python -m tests.bench.rollout --environment FOLDER [--json FILE]`.

The tokens per second of `rollout.engine=sglang`, asked as the collector asks it (all answers to all prompts of a draw
at once, in groups), over those of a bare client: plain asynchronous httpx that posts the same bodies to the same
server, as many at once, and reads ids and log-probs. Both take turns, with an empty prefix cache each; medians are
compared. The model is tiny, and the server shares the cores with its client, so the client has no time to hide in.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from mppo.batch.trajectory import TrajectoryId
from mppo.cli.compose import load_config
from mppo.config import Config
from mppo.megatron import topology
from mppo.rollout.agents.session import Session
from mppo.rollout.collector import together
from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.engines.sglang.client import sampling_fields
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.launching import sglang_engine
from mppo.weights.pretrained import open_model
from tests.bench.relaunch import relaunch, under_torchrun
from tests.bench.sglang_actor import actor_weights, servers_are_ready

MODULE = "tests.bench.rollout"
CONNECTIONS = 256
TIMEOUT_S = 300.0
VERSION = 1


@dataclass(frozen=True)
class Draw:
    """What is asked in a turn."""

    prompts: list[tuple[int, ...]]
    samples: int
    """Answers to each."""
    params: SamplingParams

    @classmethod
    def of(cls, options: argparse.Namespace, vocab_size: int) -> "Draw":
        rng = random.Random(0)
        prompts = [tuple(rng.randrange(vocab_size) for _ in range(options.prompt)) for _ in range(options.prompts)]
        return cls(prompts, options.samples, SamplingParams(options.response, ignore_eos=True))

    @property
    def requests(self) -> int:
        return len(self.prompts) * self.samples


async def by_engine(engine: SglangEngine, draw: Draw) -> int:
    """Tokens that came."""

    async def one(number: int, sample: int, prompt: tuple[int, ...]) -> int:
        session = Session(engine, TrajectoryId(number, sample), draw.params, 0, TIMEOUT_S)
        return len(session.trajectory(prompt, await session.complete(prompt)).token_ids) - len(prompt)

    async def group(number: int, prompt: tuple[int, ...]) -> int:
        return sum(await together(*(one(number, sample, prompt) for sample in range(draw.samples))))

    return sum(await together(*(group(number, prompt) for number, prompt in enumerate(draw.prompts))))


async def by_bare_client(http: httpx.AsyncClient, draw: Draw) -> int:
    """Tokens that came."""

    async def one(name: str, prompt: tuple[int, ...]) -> int:
        body = {
            "rid": name,
            "input_ids": list(prompt),
            "sampling_params": sampling_fields(draw.params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "cache_salt": str(VERSION),
        }
        answer = (await http.post("/generate", json=body)).raise_for_status().json()
        return len([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])

    asked = [(f"bare-{n}-{sample}", prompt) for n, prompt in enumerate(draw.prompts) for sample in range(draw.samples)]
    return sum(await asyncio.gather(*(one(name, prompt) for name, prompt in asked)))


async def measure(engine: SglangEngine, draw: Draw, turns: int, progress: Progress) -> dict[str, list[float]]:
    """Seconds of each turn of both."""
    url = engine.fleet.members[0].client.url
    seconds: dict[str, list[float]] = {"mppo": [], "bare": []}
    task = progress.add_task("turns", total=2 * turns)
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S) as http:
        for turn in range(turns + 1):
            for name in ("mppo", "bare") if turn % 2 else ("bare", "mppo"):
                (await http.post("/flush_cache")).raise_for_status()
                start = perf_counter()
                tokens = await (by_engine(engine, draw) if name == "mppo" else by_bare_client(http, draw))
                took = perf_counter() - start
                assert tokens == draw.requests * draw.params.max_new_tokens, f"{name}: {tokens} tokens came"
                if turn:  # the first of each warms up
                    seconds[name].append(took)
                    progress.update(task, advance=1, description=f"{name} {tokens / took:.0f} tokens/s")
    return seconds


def configuration(options: argparse.Namespace, folder: str) -> Config:
    return load_config(
        "class",
        [
            "parallel=single",
            "rollout.engine=sglang",
            f"rollout.sglang.environment={options.environment.resolve()}",
            f"trainer.out_dir={folder}",
        ],
    )


def work(options: argparse.Namespace, folder: str) -> None:
    """The only rank."""
    console = Console(stderr=True)
    config = configuration(options, folder)
    place = topology.initialize(config.parallel, seed=1)
    model = open_model(config.model, seed=0)
    draw = Draw.of(options, model.config.vocab_size)
    with asyncio.Runner() as runner, Progress(console=console) as progress:
        engine = sglang_engine(config, model)
        try:
            console.print("an SGLang server starts", highlight=False)
            runner.run(servers_are_ready(engine))
            runner.run(engine.update_weights(actor_weights(config, model, place), VERSION))
            seconds = runner.run(measure(engine, draw, options.turns, progress))
        finally:
            runner.run(engine.close())
    report(draw, seconds, options)
    topology.shutdown()


def report(draw: Draw, seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    tokens = draw.requests * draw.params.max_new_tokens
    speeds = {name: tokens / median(times) for name, times in seconds.items()}
    ratio = speeds["mppo"] / speeds["bare"]
    of_pairs = sorted(bare / own for own, bare in zip(seconds["mppo"], seconds["bare"], strict=True))
    print(
        f"{draw.requests} requests of {options.prompt} + {options.response} tokens at once, median of {options.turns}"
        f" turns: mppo {speeds['mppo']:.0f} tokens/s, a bare client {speeds['bare']:.0f}"
    )
    print(f"rollout_over_bare_client: {ratio:.4f} (at least 0.95); of neighbouring turns {median(of_pairs):.4f}")
    if options.json is not None:
        found: dict[str, Any] = {
            "rollout_over_bare_client": ratio,
            "median_over_neighbouring_turns": median(of_pairs),
            "requests": draw.requests,
            "tokens": tokens,
            "seconds": {name: median(times) for name, times in seconds.items()},
            "tokens_per_second": speeds,
            "seconds_of_turns": seconds,
            "samples_of_a_group": draw.samples,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(f"python -m {MODULE}", description=__doc__.splitlines()[0])
    named = os.environ.get("MPPO_SGLANG_ENV")
    parser.add_argument(
        "--environment", type=Path, default=named, required=named is None, help="made by launch/sglang.sh"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--prompts", type=int, default=8, help="of a draw")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--turns", type=int, default=30, help="of each")
    parser.add_argument("--quick", action="store_true", help="another default for turns")
    if parser.parse_args().quick:
        parser.set_defaults(turns=3)
    options = parser.parse_args()
    if under_torchrun():
        with tempfile.TemporaryDirectory() as folder:
            work(options, folder)
    else:
        sys.exit(relaunch(MODULE, 1, sys.argv[1:]))


if __name__ == "__main__":
    main()
