"""Reward functions for the tests of worker processes, which import them from here. It imports nothing heavy."""

import asyncio
import os
import sys
import time
from pathlib import Path

from mppo.rollout.rewards import Reward, Sample


def length(sample: Sample) -> float:
    return len(sample.response)


def by_answer(sample: Sample):
    """Whatever the answer asks for."""
    match sample.response:
        case "hang":
            while True:
                time.sleep(60)
        case "raise":
            raise ValueError("no number in it")
        case "none":
            return None
        case "text":
            return "good"
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "parts":
            return Reward(1.0, 0.5, token_rewards=[0.0] * len(sample.token_ids), parts={"short": 2.0})
        case _:
            return 1.0


def half_a_second(sample: Sample) -> float:
    """Notes when it started and ended, in a file of its own."""
    started = time.time()
    time.sleep(0.5)
    Path(sample.fields["folder"], f"{sample.prompt_number}-{sample.response}").write_text(f"{started} {time.time()}")
    return 1.0


def hang_and_tell(sample: Sample) -> float:
    """Never comes back from a call in C, and says first which process it is."""
    file = Path(sample.fields["file"])
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    return float(9 ** (9**9) > 0)


def process(sample: Sample) -> Reward:
    """Where it runs, and whether torch is there."""
    return Reward(os.getpid(), parts={"torch": "torch" in sys.modules, "children": can_have_children()})


def can_have_children() -> bool:
    import multiprocessing

    return not multiprocessing.current_process().daemon


def group_mean(samples: list[Sample]) -> list[float]:
    """Takes the answers to one prompt at once."""
    mean = sum(len(s.response) for s in samples) / len(samples)
    return [len(s.response) - mean for s in samples]


group_mean.batch = True


async def asked(sample: Sample) -> float:
    """As `by_answer`, of a service that takes its time."""
    await asyncio.sleep(0.2 if sample.response != "hang" else 60)
    return by_answer(sample)
