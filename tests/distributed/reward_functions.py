"""Reward functions of whole runs, which worker processes import from here. It imports nothing heavy."""

from mppo.rollout.rewards import Reward, Sample


def reward_in_parts(sample: Sample) -> Reward:
    """The class task, and how early in the alphabet or the digits the answer is."""
    wanted = str.isdigit if sample.ground_truth == "d" else str.isalpha
    share = sum(wanted(c) for c in sample.response) / max(sample.action_count, 1)
    order = sum(ord(c) % 8 for c in sample.response) / (8 * max(len(sample.response), 1))
    return Reward(share + order, accuracy=share, parts={"share": share, "order": order})


def equal_but_for_some(sample: Sample) -> float:
    """Two thirds of the prompts get the same for all answers, whatever they are."""
    return float(sample.response[:1] > "m" and sample.prompt_number % 3 == 0)


def not_a_number(sample: Sample) -> float:
    """Only for the answers to the second prompt."""
    return float("nan") if sample.prompt_number == 1 else 1.0


def good_at_first(sample: Sample) -> float:
    """Refuses the second step of a run of eight prompts a step."""
    if sample.prompt_number >= 8:
        raise RuntimeError("no more")
    return 1.0


def good_in_training(sample: Sample) -> float:
    """Refuses validation: held-out prompts that have larger numbers than those of three steps of eight prompts."""
    if sample.prompt_number >= 24:
        raise RuntimeError("not that one")
    return 1.0
