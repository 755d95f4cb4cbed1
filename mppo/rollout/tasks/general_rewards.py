"""Rewards that fit many tasks: they compare the answer with the ground truth."""

import logging
from dataclasses import dataclass

from mppo.rollout.rewards import REWARDS, Sample


@dataclass(frozen=True)
class ExactMatchConfig:
    first_line: bool = False
    """Compare only the first line of the answer."""
    ignore_case: bool = False
    """Take upper and lower case for the same."""


THOUGHTS = "<think>", "</think>"
"""What a model thinks before it answers stands between these."""


def after_thinking(sample: Sample) -> str:
    """The answer without the thoughts before it; empty where they do not end.

    They may begin in the prompt, whose chat template opens them.
    """
    opened, closed = THOUGHTS
    _, end, answer = sample.response.rpartition(closed)
    if end:
        return answer
    begins_in_prompt = sample.prompt.rstrip().endswith(opened)
    return "" if begins_in_prompt or sample.response.lstrip().startswith(opened) else sample.response


@REWARDS.register("exact_match", config=ExactMatchConfig)
def exact_match(sample: Sample, config: ExactMatchConfig) -> float:
    """1 when the answer, without thoughts before it and stripped, is the ground truth."""
    given, wanted = after_thinking(sample).strip(), str(sample.ground_truth).strip()
    if config.first_line:
        given = given.partition("\n")[0].strip()
    if config.ignore_case:
        given, wanted = given.lower(), wanted.lower()
    return float(given == wanted)


@REWARDS.register("math_verify", packages=("math_verify",))
def math_verify(sample: Sample) -> float:
    """1 when math-verify finds the answer, without thoughts before it, mathematically equal to the ground truth.

    The package's own time limits are off: they rest on SIGALRM, which a long integer power does not let through.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # or each call warns that its time limits are off
    wanted = parse(f"${sample.ground_truth}$", parsing_timeout=None)
    return float(verify(wanted, parse(after_thinking(sample), parsing_timeout=None), timeout_seconds=None))
