"""Rewards beside generation: real worker processes, real deadlines, and what becomes of failures."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mppo.batch.trajectory import Status, Trajectory, TrajectoryId
from mppo.config import RewardConfig
from mppo.errors import ConfigError, RewardError
from mppo.rollout.answer_text import AnswerText
from mppo.rollout.prompts import Prompt
from mppo.rollout.reward_workers import RewardWorkers
from mppo.rollout.rewards import RewardFunction, Rewards
from mppo.rollout.tasks import rewards_of
from mppo.weights.presets import PRESETS

pytestmark = pytest.mark.unit

TOKENIZER = PRESETS.get("char").fn({})[1]
TEXT = AnswerText(TOKENIZER, {TOKENIZER.eos_token_id})
HERE = "tests.unit.reward_functions"


@contextmanager
def rewards(name, **config):
    config = RewardConfig(function=name if name == "math_verify" else f"{HERE}:{name}", **{"workers": 2} | config)
    workers = RewardWorkers(rewards_of(config), config, TEXT)
    try:
        yield workers
    finally:
        workers.close()


def answered(prompt: str, answers: list[str], number: int = 12, **fields) -> list[tuple[Trajectory, Prompt]]:
    prompt_ids = tuple(TOKENIZER(prompt)["input_ids"])
    group = []
    for sample, answer in enumerate(answers):
        ids = torch.tensor([*prompt_ids, *TOKENIZER(answer)["input_ids"]])
        mask = torch.arange(len(ids)) >= len(prompt_ids)
        trajectory = Trajectory(TrajectoryId(number, sample), ids, mask, torch.zeros(len(ids)))
        group.append((trajectory, Prompt(prompt, prompt_ids, fields.get("ground_truth", "3"), fields)))
    return group


def judge(workers, *groups):
    """All groups at the same time."""

    async def all_at_once():
        return await asyncio.gather(*(workers.judge(group) for group in groups))

    return asyncio.run(all_at_once())


def test_the_answer_is_what_the_model_wrote_and_nothing_else():
    tokens = {"prompt": "1+2=", "call": "(1+2)", "tool": "3", "answer": "ab"}
    ids = [TOKENIZER(text)["input_ids"] for text in tokens.values()]
    wrote = [name in ("call", "answer") for name, text in tokens.items() for _ in text]
    end = torch.tensor([TOKENIZER.eos_token_id])
    trajectory = Trajectory(
        TrajectoryId(3, 1),
        torch.cat([torch.tensor(sum(ids, [])), end]),
        torch.tensor([*wrote, True]),
        torch.zeros(len(wrote) + 1),
    )
    seen = []
    function = RewardFunction("mine", lambda sample: seen.append(sample) or 1.0)
    workers = RewardWorkers(Rewards({None: function}), RewardConfig(workers=0), TEXT)
    ((judgement,),) = judge(workers, [(trajectory, Prompt("1+2=", tuple(ids[0]), "3", {"level": 4}))])
    (sample,) = seen
    assert (sample.prompt, sample.response, sample.ground_truth) == ("1+2=", "(1+2)ab", "3")
    assert (sample.fields, sample.prompt_number, sample.action_count) == ({"level": 4}, 3, 8)
    assert sample.token_ids == tuple(trajectory.token_ids.tolist())
    assert sample.action_mask == tuple(trajectory.action_mask.tolist())
    assert (judgement.uid, judgement.score, judgement.accuracy) == (TrajectoryId(3, 1), 1.0, 1.0)


def test_worker_processes_judge_many_groups_in_order():
    with rewards("length") as workers:
        groups = [answered("q=", ["a" * (k + i) for i in range(4)], number=k) for k in range(10)]
        for _ in range(2):  # one sample a task at first, then many
            for k, judgements in enumerate(judge(workers, *groups)):
                assert [j.score for j in judgements] == [k, k + 1, k + 2, k + 3]
                assert [j.uid for j in judgements] == [TrajectoryId(k, i) for i in range(4)]
        assert workers.take_counts() == {"reward/samples": 80, "reward/failures": 0, "reward/timeouts": 0}
        assert workers.take_counts()["reward/samples"] == 0
    with rewards("process") as workers:
        ((judgement,),) = judge(workers, answered("q=", ["x"]))
        assert judgement.score != os.getpid()
        assert judgement.parts["children"] == 1.0
    with rewards("process", workers=0) as workers:
        ((judgement,),) = judge(workers, answered("q=", ["x"]))
        assert judgement.score == os.getpid()


THINKS = "<think>", "</think>"


@pytest.mark.parametrize(
    ("skip", "status", "text"),
    [
        (False, Status.FINISHED, "<think>1</think>3"),
        (True, Status.FINISHED, "13"),
        (False, Status.TRUNCATED, "<think>1</think>3<eos>"),
    ],
)
def test_special_tokens_are_seen_but_for_the_one_that_ended_the_answer(skip, status, text):
    tokenizer = PRESETS.get("char").fn({})[1]
    tokenizer.add_special_tokens({"additional_special_tokens": list(THINKS)})
    ids = torch.tensor(tokenizer("q=<think>1</think>3<eos>")["input_ids"])
    trajectory = Trajectory(TrajectoryId(0, 0), ids, torch.arange(len(ids)) >= 2, torch.zeros(len(ids)), status=status)
    read = AnswerText(tokenizer, {tokenizer.eos_token_id}, skip)
    assert read.of_actions(trajectory) == read.after(2, trajectory) == text


def test_each_data_source_has_a_reward_of_its_own():
    sources = {
        "math": {"function": "exact_match", "options": {"ignore_case": True}},
        "long": {"function": f"{HERE}:length"},
    }
    config = RewardConfig(sources=sources, workers=1)
    workers = RewardWorkers(rewards_of(config), config, TEXT)
    try:
        groups = [
            [(trajectory, replace(prompt, source=source)) for trajectory, prompt in answered("q=", answers)]
            for source, answers in (("math", ["3", "4"]), ("long", ["1234", "1"]))
        ]
        scores = [[judgement.score for judgement in group] for group in judge(workers, *groups)]
        assert scores == [[1.0, 0.0], [4.0, 1.0]]
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("exact_match", "reward.sources.math is 'exact_match'; it must be"),
        ({"options": {}}, "reward.sources.math is .*; it must be"),
        ({"function": "exakt"}, "unknown reward 'exakt'"),
        ({"function": "exact_match", "options": {"x": 1}}, "reward.sources.math.options.x"),
        ({"function": "exact_match", "name": "x"}, "reward.sources.math.name"),
    ],
)
def test_a_data_source_without_a_proper_reward_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        rewards_of(RewardConfig(sources={"math": given}))


def test_worker_processes_import_only_the_reward():
    script = """
import asyncio
import torch
from mppo.rollout.reward_pool import RewardPool
from mppo.rollout.rewards import RewardFunction, Sample
from tests.unit.reward_functions import process
pool = RewardPool([RewardFunction("mine", process)], workers=1, timeout_s=60)
[outcome] = asyncio.run(pool.call(pool.functions[0], [Sample("q=", "x", "3", {}, (0, 1), (False, True))]))
pool.close()
print(outcome.parts)
"""
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed == "{'torch': 0.0, 'children': 1.0}\n"


def test_parts_and_token_rewards_come_back():
    with rewards("by_answer") as workers:
        ((judgement,),) = judge(workers, answered("q=", ["parts"]))
    assert (judgement.score, judgement.accuracy, judgement.parts) == (1.0, 0.5, {"short": 2.0})
    assert judgement.token_rewards.tolist() == [0.0] * len("q=parts")


def test_thirty_two_rewards_of_half_a_second_run_eight_at_a_time(tmp_path):
    with rewards("half_a_second", workers=8) as workers:
        (tmp_path / "start").mkdir()
        judge(workers, answered("q=", list("abcdefghijklmnop"), folder=str(tmp_path / "start")))  # all workers are up
        groups = [answered("q=", list("abcdefgh"), number=k, folder=str(tmp_path)) for k in range(4)]
        judge(workers, *groups)
    times = [tuple(map(float, file.read_text().split())) for file in tmp_path.glob("?-?")]
    assert len(times) == 32
    running = [sum(start <= moment < end for start, end in times) for moment, _ in times]
    assert max(running) == 8
    # four rounds of half a second; on a busy machine a worker may sit out a round or two
    assert max(end for _, end in times) - min(start for start, _ in times) < 4


def test_what_hangs_is_ended_by_the_deadline_and_nothing_else_is_lost():
    with rewards("by_answer", on_error="abstain", timeout_s=1.0) as workers:
        judge(workers, answered("q=", list("abcdefgh")))  # from now on samples travel together
        answers = ["a", "hang", "b", "raise", "none", "exit", "die", "c"]
        groups = [answered("q=", answers), answered("q=", list("abcdefgh"), number=13)]
        judged, others = judge(workers, *groups)
        assert [j.score for j in judged] == [1.0, None, 1.0, None, None, None, None, 1.0]
        assert [j.abstains for j in judged] == [answer not in "abc" for answer in answers]
        assert [j.score for j in others] == [1.0] * 8
        assert workers.take_counts() == {"reward/samples": 24, "reward/failures": 5, "reward/timeouts": 1}


class Spelled:
    """A tokenizer of code points: the preset's has no braces."""

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def test_an_endless_power_is_ended_by_the_deadline():
    with rewards("math_verify", on_error="score", error_score=-1.0, timeout_s=4.0, workers=1) as workers:
        workers.text = AnswerText(Spelled(), ())
        prompt = Prompt("1+2=", (0,), "3")
        answers = ["1+2", "$9^{9^{9^{9}}}$", "4"]
        group = []
        for sample, answer in enumerate(answers):
            ids = torch.tensor([0, *map(ord, answer)])
            mask = torch.arange(len(ids)) > 0
            group.append((Trajectory(TrajectoryId(0, sample), ids, mask, torch.zeros(len(ids))), prompt))
        ((good, endless, bad),) = judge(workers, group)
        assert (good.score, endless.score, bad.score) == (1.0, -1.0, 0.0)
        assert workers.take_counts() == {"reward/samples": 3, "reward/failures": 1, "reward/timeouts": 1}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise", r"ValueError: no number in it \(reward_functions.py:\d+\); reward.on_error=abstain"),
        ("none", "the function returned None"),
        ("exit", "SystemExit: 3"),
        ("die", "its worker process died with exit code 7"),
        ("hang", r"was not done after reward\.timeout_s=1 seconds"),
    ],
)
def test_a_failure_is_named_with_its_prompt_sample_and_function(answer, said):
    workers = 2 if answer in ("die", "hang") else 0
    with (
        rewards("by_answer", workers=workers, timeout_s=1.0) as workers,
        pytest.raises(RewardError, match=said) as caught,
    ):
        judge(workers, answered("q=", ["a", answer]))
    assert f"reward '{HERE}:by_answer' of prompt 12, sample 1, prompt 'q=', answer '{answer}'" in str(caught.value)


def test_a_value_of_which_no_reward_can_be_made_ends_the_run_in_any_case():
    with rewards("by_answer", workers=0, on_error="abstain") as workers, pytest.raises(RewardError, match="'good'"):
        judge(workers, answered("q=", ["text"]))


def test_too_many_failures_end_the_run():
    with rewards("by_answer", workers=0, on_error="abstain", max_failure_rate=0.25) as workers:
        for _ in range(30):
            judge(workers, answered("q=", ["a", "a", "a", "none"]))  # a quarter is borne
        with pytest.raises(RewardError, match=r"31 of the latest 1\d\d answers got no reward.*max_failure_rate=0.25"):
            judge(workers, answered("q=", ["none"]))


def test_a_busy_worker_ends_with_a_trainer_that_is_killed(tmp_path):
    script = f"""
import asyncio
from mppo.rollout.reward_pool import RewardPool
from mppo.rollout.rewards import RewardFunction, Sample
from tests.unit.reward_functions import hang_and_tell
pool = RewardPool([RewardFunction("mine", hang_and_tell)], workers=1, timeout_s=600)
sample = Sample("q=", "x", "3", {{"file": {str(tmp_path / "pid")!r}}}, (0, 1), (False, True))
asyncio.run(pool.call(pool.functions[0], [sample]))
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until((tmp_path / "pid").is_file)
    finally:
        trainer.kill()
        trainer.wait()
    worker = Path("/proc", (tmp_path / "pid").read_text())
    wait_until(lambda: not worker.exists() or "State:\tZ" in (worker / "status").read_text())


def wait_until(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_functions_of_a_group_see_the_whole_group():
    with rewards("group_mean") as workers:
        first, second = judge(workers, answered("q=", ["a", "aaa"]), answered("q=", ["a", "a", "aaaa"]))
        assert [j.score for j in first] == [-1.0, 1.0]
        assert [j.score for j in second] == [-1.0, -1.0, 2.0]
        assert judge(workers, []) == [[]]  # every answer to a prompt was aborted


def test_async_functions_share_the_event_loop_and_the_deadline():
    with rewards("asked", on_error="abstain", timeout_s=1.0) as workers:
        started = time.monotonic()
        ((*judged,),) = judge(workers, answered("q=", ["a"] * 20 + ["raise", "hang"]))
        assert time.monotonic() - started < 3  # one after the other: five seconds
        assert [j.score for j in judged] == [1.0] * 20 + [None, None]
        assert workers.take_counts() == {"reward/samples": 22, "reward/failures": 2, "reward/timeouts": 1}


def test_a_function_that_workers_cannot_import_is_refused_before_the_run():
    function = RewardFunction("mine", lambda sample: 1.0)
    with pytest.raises(
        ConfigError, match=r"reward\.function=mine cannot be sent to worker processes.*reward\.workers=0"
    ):
        RewardWorkers(Rewards({None: function}), RewardConfig(), TEXT)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workers": -1}, "reward.workers is -1"),
        ({"timeout_s": 0}, "reward.timeout_s is 0"),
        ({"on_error": "skip"}, "reward.on_error is 'skip'; choose one of raise, abstain, score"),
        ({"on_error": "score"}, "reward.on_error=score needs reward.error_score"),
        ({"error_score": 0.0}, "reward.error_score has no effect with reward.on_error=raise"),
        ({"on_error": "score", "error_score": float("nan")}, "reward.error_score is nan"),
        ({"on_error": "abstain", "max_failure_rate": 0.0}, "reward.max_failure_rate is 0.0"),
        ({"max_failure_rate": 0.1}, "reward.max_failure_rate has no effect with reward.on_error=raise"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        RewardConfig(**fields)
