"""What validation reports of the answers to held-out prompts."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from statistics import fmean

from mppo.batch.trajectory import Answer, Status


@dataclass(frozen=True)
class Judged:
    """What is told to all ranks of an answer."""

    prompt: int
    """Its number among the held-out prompts."""
    source: str | None
    accuracy: float
    reward: float
    length: int
    """Tokens that the policy wrote."""
    truncated: bool
    failed: bool
    """No reward function has judged it; its accuracy and reward count as 0."""

    @classmethod
    def of(cls, answer: Answer) -> "Judged":
        trajectory, judgement = answer.trajectory, answer.judgement
        return cls(
            prompt=trajectory.uid.prompt,
            source=judgement.source,
            accuracy=judgement.accuracy,
            reward=judgement.total_reward,
            length=trajectory.action_count,
            truncated=trajectory.status == Status.TRUNCATED,
            failed=judgement.abstains,
        )


def validation_metrics(answers: Iterable[Judged]) -> dict[str, float]:
    """Means over all answers, and pass@k for k = 1, 2, 4, ... up to the answers to a prompt, by `val/...`.

    Where prompts name data sources, accuracy and reward of each, `val/<source>/...`, too.
    """
    answers = list(answers)
    metrics = {
        "val/accuracy": fmean(a.accuracy for a in answers),
        "val/reward": fmean(a.reward for a in answers),
        "val/response_length": fmean(a.length for a in answers),
        "val/truncated_share": fmean(a.truncated for a in answers),
        "val/not_judged": float(sum(a.failed for a in answers)),
    }
    for source in sorted({a.source for a in answers if a.source is not None}):
        own = [a for a in answers if a.source == source]
        metrics[f"val/{source}/accuracy"] = fmean(a.accuracy for a in own)
        metrics[f"val/{source}/reward"] = fmean(a.reward for a in own)
    return metrics | _passes(answers)


def _passes(answers: list[Judged]) -> dict[str, float]:
    """An answer passes whose accuracy is at least 1."""
    by_prompt: dict[int, list[bool]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt, []).append(answer.accuracy >= 1)
    fewest = min(map(len, by_prompt.values()))
    sizes = sorted({*(2**i for i in range(fewest.bit_length())), fewest}) if fewest > 1 else []
    return {
        f"val/pass@{k}": fmean(pass_at_k(len(passed), sum(passed), k) for passed in by_prompt.values()) for k in sizes
    }


def pass_at_k(answers: int, passed: int, k: int) -> float:
    """The probability that one of k answers passes, drawn from `answers` of which `passed` do: the estimate without
    bias of Codex (arXiv:2107.03374, eq. 1)."""
    return 1.0 - comb(answers - passed, k) / comb(answers, k)
