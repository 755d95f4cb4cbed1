"""What a server's answers mean, and which server is asked."""

import asyncio

import pytest

from mppo.batch.trajectory import Span, Status
from mppo.errors import ConfigError, EngineError
from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.engines.sglang.client import ServerGone, SglangClient, completion, sampling_fields
from mppo.rollout.engines.sglang.fleet import Fleet, Member
from tests.unit.test_config import config_with

pytestmark = pytest.mark.unit

ANSWER = {
    "output_ids": [5, 6, 7],
    "meta_info": {
        "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
        "output_token_sampling_logprobs": [-0.25, -0.5, -1.0],
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}],
    },
}


def changed(**meta) -> dict:
    return ANSWER | {"meta_info": ANSWER["meta_info"] | meta}


def test_an_answer_is_read():
    found = completion(ANSWER)
    assert found.token_ids == (5, 6, 7) and found.log_probs == (-0.5, -1.0, -2.0)
    assert found.spans == (Span(0, 1, 2), Span(1, 3, 3))
    assert found.status == Status.FINISHED
    assert completion(ANSWER, over_kept=True).log_probs == (-0.25, -0.5, -1.0)


def test_without_spans_all_is_of_the_version_that_is_told():
    assert completion(changed(weight_versions=None)).spans == (Span(0, 3, 3),)


@pytest.mark.parametrize(
    ("finish", "status"), [("length", Status.TRUNCATED), ("abort", Status.ABORTED), ("new", Status.ABORTED)]
)
def test_how_it_ended(finish, status):
    assert completion(changed(finish_reason={"type": finish})).status == status


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        None,
        "text",
        {"text": "hello"},
        ANSWER | {"output_ids": [5, 6]},
        ANSWER | {"output_ids": [5, 6, "7"]},
        ANSWER | {"output_ids": [5, 6, -7]},
        ANSWER | {"output_ids": [5, 6, True]},
        changed(output_token_logprobs=[[None, 5, None]] * 3),
        changed(output_token_logprobs=[[float("nan"), 5, None]] * 3),
        changed(output_token_logprobs=None),
        changed(finish_reason=None),
        changed(weight_versions=None, weight_version="default"),
        changed(weight_versions=[{"version": "2", "start": 0, "end": 2}]),
        changed(weight_versions=[{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 1, "end": 3}]),
    ],
)
def test_what_is_no_whole_answer_is_none(answer):
    with pytest.raises(ServerGone):
        completion(answer)


def test_sampling_in_the_words_of_the_server():
    told = sampling_fields(SamplingParams(7, 0.5, top_p=0.9, stop=("a",), stop_token_ids=(3,)))
    assert (told["max_new_tokens"], told["temperature"], told["top_p"], told["top_k"]) == (7, 0.5, 0.9, -1)
    assert told["stop"] == ["a"] and told["stop_token_ids"] == [3]
    assert told["no_stop_trim"] and not told["skip_special_tokens"]
    assert sampling_fields(SamplingParams(7, top_k=4))["top_k"] == 4


def fleet(versions: list[int | None]) -> Fleet:
    return Fleet(
        [Member(n, SglangClient(f"http://127.0.0.1:{n}"), version=version) for n, version in enumerate(versions)]
    )


def test_a_group_stays_together_and_another_goes_where_least_is_under_way():
    async def run() -> None:
        servers = fleet([4, 4])
        first = servers.take(1, 4)
        first.under_way.add(asyncio.create_task(asyncio.sleep(0)))
        assert servers.take(1, 4) is first
        assert servers.take(2, 4) is not first
        servers.give_back(1)
        servers.give_back(1)
        first.under_way.clear()
        assert servers.take(1, 4) is servers.members[0]

    asyncio.run(run())


def test_only_servers_with_the_version_are_asked():
    servers = fleet([3, 4, None])
    assert {servers.take(group, 4).number for group in range(5)} == {1}
    servers.members[1].retire("it is on fire")
    with pytest.raises(EngineError, match="http://127.0.0.1:1: it is on fire"):
        servers.take(9, 4)


def test_what_a_server_was_asked_ends_with_it():
    async def run() -> None:
        member = fleet([1]).members[0]
        asked = asyncio.create_task(asyncio.sleep(60))
        member.under_way.add(asked)
        member.retire("gone")
        await asyncio.wait({asked})
        assert asked.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.sglang.urls=[localhost:3000]"], "give http://host:port"),
        (["rollout.sglang.urls=[http://10.0.0.1:3000]"], "on another machine"),
        (["rollout.sglang.transport=carrier"], "rollout.sglang.transport"),
        (["rollout.sglang.in_flight=carry"], "rollout.sglang.in_flight"),
        (["rollout.sglang.servers=0"], "rollout.sglang.servers"),
        (["rollout.sglang.buffer_mb=0"], "rollout.sglang.buffer_mb"),
        (["rollout.sglang.transport=delta", "rollout.sglang.delta.largest_share=2"], "largest_share"),
        (["rollout.sglang.colocated=true", "rollout.sglang.transport=broadcast"], "GPUs of their own"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        config_with("rollout.engine=sglang", *overrides)
