"""All injections, then clean runs, on one real server."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from mppo.batch.trajectory import Trajectory, Turn
from mppo.rollout.agents.session import Session
from mppo.rollout.prompts import Prompt
from tests.mismatch.injections import FOURTEEN, MORE
from tests.mismatch.world import World, largest_difference

WEIGHTS_EVERY = 10
"""Clean runs between refits of new weights."""


@dataclass
class Study:
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    clean_runs: int = 0
    false_alarms: int = 0
    alarms: list[str] = field(default_factory=list)
    largest_clean_difference: float = 0.0
    clean_tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        counted = [self.cases[name] for name in FOURTEEN if name in self.cases]
        return {
            "injected": len(counted),
            "named": sum(case["named"] for case in counted),
            **vars(self),
        }


def study(
    folder: Path, overrides: list[str], clean_runs: int, say: Callable[[str], None], only: list[str] | None = None
) -> dict[str, Any]:
    start, found = monotonic(), Study()
    world = World.open(folder, overrides)
    say(f"server ready after {monotonic() - start:.0f} s")
    try:
        for name, inject in (FOURTEEN | MORE).items():
            if not only or name in only:
                _case(world, name, inject, found, say)
        for run in range(clean_runs):
            _clean(world, run, found, say)
    finally:
        world.close()
    found.seconds = monotonic() - start
    return found.summary()


def _case(world: World, name: str, inject: Callable[[World], Any], found: Study, say: Callable[[str], None]) -> None:
    start = monotonic()
    world.heal()
    injected = inject(world)
    texts = [f"{f.cause} [{f.place}] {f.shown}" for f in injected.findings]
    found.cases[name] = {"named": injected.named, "findings": texts, "seconds": round(monotonic() - start, 2)}
    say(f"{name}: {'named' if injected.named else 'NOT NAMED'}" + "".join(f"\n    {text}" for text in texts))


async def two_turns(prompt: Prompt, session: Session) -> list[Trajectory]:
    """An agent that keeps the ids of its first answer, as it should."""
    first = await session.complete(prompt.token_ids)
    before = (*prompt.token_ids, *first.token_ids, 10, 11)
    second = await session.complete(before, turn=1)
    ids, start = (*before, *second.token_ids), len(prompt.token_ids)
    middle = start + len(first.token_ids)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[start:middle] = mask[len(before) :] = True
    log_probs = torch.zeros(len(ids))
    log_probs[mask] = torch.tensor([*first.log_probs, *second.log_probs])
    turns = (Turn(start, middle), Turn(len(before), len(ids)))
    return [Trajectory(session.uid, torch.tensor(ids), mask, log_probs, (), turns)]


def _clean(world: World, run: int, found: Study, say: Callable[[str], None]) -> None:
    draw = random.Random(run)
    if run % WEIGHTS_EVERY == 0:
        world.heal() if run == 0 else world.new_weights()
        world.refit()
    temperature = draw.choice([0.6, 0.8, 1.0, 1.0, 1.2, 1.5])
    head = replace(world.trainer.head, temperature=temperature)
    sides = replace(world.sides, trainer=replace(world.trainer, head=head))
    if draw.random() < 0.25:
        sides = replace(sides, agent=two_turns)
    prompts, greedy = world.draw_prompts(draw.randrange(2, 7), draw), draw.random() < 0.1
    findings, evidence = world.diagnose(
        sides,
        prompts=prompts,
        temperature=0.0 if greedy else temperature,
        max_new_tokens=draw.randrange(4, 25),
        ignore_eos=draw.random() < 0.5,
    )
    found.clean_runs += 1
    found.false_alarms += bool(findings)
    found.alarms += [f"run {run}: {f.cause} [{f.place}] {f.shown}" for f in findings]
    for alarm in findings:
        say(f"false alarm in run {run}: {alarm.cause} [{alarm.place}] {alarm.shown}")
    found.largest_clean_difference = max(found.largest_clean_difference, largest_difference(evidence))
    found.clean_tokens += sum(len(scored.token_ids) for scored in evidence.trajectories)
