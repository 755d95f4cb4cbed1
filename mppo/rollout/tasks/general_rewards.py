"""Rewards that fit many tasks: they compare the answer with the ground truth."""

from dataclasses import dataclass

from mppo.rollout.rewards import REWARDS, Sample


@dataclass(frozen=True)
class ExactMatchConfig:
    first_line: bool = False
    """Compare only the first line of the answer."""
    ignore_case: bool = False


@REWARDS.register("exact_match", config=ExactMatchConfig)
def exact_match(sample: Sample, config: ExactMatchConfig) -> float:
    """1 when the answer, stripped, is the ground truth."""
    given, wanted = sample.response.strip(), str(sample.ground_truth).strip()
    if config.first_line:
        given = given.partition("\n")[0].strip()
    if config.ignore_case:
        given, wanted = given.lower(), wanted.lower()
    return float(given == wanted)


@REWARDS.register("math_verify", packages=("math_verify",))
def math_verify(sample: Sample) -> float:
    """1 when math-verify finds the answer mathematically equal to the ground truth.

    The package's own time limits are off: they rest on SIGALRM, which a long integer power does not let through.
    """
    from math_verify import parse, verify

    wanted = parse(f"${sample.ground_truth}$", parsing_timeout=None)
    return float(verify(wanted, parse(sample.response, parsing_timeout=None), timeout_seconds=None))
