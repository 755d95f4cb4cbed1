"""What validation reports: means, data sources, and pass@k."""

from itertools import combinations

import pytest

from mppo.trainer.validation import Judged, pass_at_k, validation_metrics

pytestmark = pytest.mark.unit


def judged(prompt: int, accuracy: float, source: str | None = None, **fields) -> Judged:
    given = {"reward": 2 * accuracy, "length": 3, "truncated": False, "failed": False} | fields
    return Judged(prompt, source, accuracy, **given)


@pytest.mark.parametrize(("answers", "passed", "k"), [(4, 1, 1), (4, 1, 2), (5, 2, 3), (5, 0, 2), (3, 3, 3), (4, 3, 2)])
def test_pass_at_k_is_the_share_of_draws_of_k_with_one_that_passes(answers, passed, k):
    draws = list(combinations([True] * passed + [False] * (answers - passed), k))
    assert pass_at_k(answers, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_several_answers_to_a_prompt_give_pass_at_k():
    found = validation_metrics([judged(0, a) for a in (1, 0, 0, 0, 0, 0)] + [judged(1, a) for a in (0.5,) * 6])
    assert found["val/accuracy"] == pytest.approx(4 / 12) and found["val/reward"] == pytest.approx(8 / 12)
    passes = {name: value for name, value in found.items() if name.startswith("val/pass@")}
    assert passes == pytest.approx({"val/pass@1": 1 / 12, "val/pass@2": 1 / 6, "val/pass@4": 1 / 3, "val/pass@6": 0.5})


def test_one_answer_to_a_prompt_has_no_pass_at_k_and_sources_have_means_of_their_own():
    answers = [judged(0, 1, "math"), judged(1, 0, "math", truncated=True, length=9), judged(2, 0, "code", failed=True)]
    assert validation_metrics(answers) == pytest.approx(
        {
            "val/accuracy": 1 / 3,
            "val/reward": 2 / 3,
            "val/response_length": 5,
            "val/truncated_share": 1 / 3,
            "val/not_judged": 1,
            "val/math/accuracy": 0.5,
            "val/math/reward": 1.0,
            "val/code/accuracy": 0.0,
            "val/code/reward": 0.0,
        }
    )
