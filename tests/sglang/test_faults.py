"""Two real servers to which everything happens that happens to servers: nothing is lost, nothing doubled."""

import pytest

from tests.distributed.ranks import call_on_ranks
from tests.sglang.fault_cases import faults
from tests.sglang.scene import LENGTH

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def found(sglang_environment, tmp_path_factory):
    """What each of two ranks saw, in order; by what happened."""
    return call_on_ranks(faults, 2, sglang_environment, tmp_path_factory.mktemp("faults"), timeout=400)[0]


def on_both(found, name):
    """What both ranks saw alike."""
    first, second = found[name]
    assert first == second
    return first


def test_both_servers_take_the_first_weights(found):
    assert on_both(found, "start") == {}
    assert [len(ids) for ids in on_both(found, "expected")] == [LENGTH] * 8


def test_what_a_killed_server_was_asked_another_answers(found):
    assert on_both(found, "killed while answering") is True


def test_a_server_that_starts_again_is_asked_once_it_has_the_weights(found):
    assert on_both(found, "while it starts") == {0: "it is starting"}
    assert on_both(found, "answers of the other") is True
    assert on_both(found, "once it has started") == {}
    assert on_both(found, "answers of both") is True


def test_a_server_that_refuses_a_request_is_asked_others(found):
    for said in found["too long a prompt"]:
        assert "/generate refused: 400" in said
    assert on_both(found, "answers of both") is True


def test_what_a_stopped_server_was_asked_another_answers(found):
    assert on_both(found, "stopped while answering") is True
    assert list(on_both(found, "while it is stopped")) == [1]
    assert on_both(found, "once it goes on") == {}


def test_a_server_that_dies_in_mid_refit_is_out_and_the_other_is_not(found):
    faults_of = on_both(found, "killed in mid-refit")
    assert list(faults_of) == [0] and "update_weights_from_tensor" in faults_of[0]
    assert on_both(found, "answers after that") is True


def test_a_cache_that_is_not_flushed_is_not_answered_from(found):
    assert on_both(found, "through a proxy") == {}
    assert "does not flush its prefix cache" in on_both(found, "a refused flush")
    assert on_both(found, "flushed again") == {}


def test_garbage_is_no_answer_and_whoever_gives_it_is_asked_no_more(found):
    garbage = on_both(found, "garbage")
    assert len(garbage) == 8 and all("without what was asked for" in said for said in garbage)
    assert on_both(found, "no garbage") == {}


def test_a_slow_server_is_taken_at_its_deadline_with_what_it_has(found):
    for answers in found["slow"]:
        assert [status for status, _ in answers] == ["ABORTED"] * 8
        assert all(0 < length < LENGTH for _, length in answers)


def test_without_a_server_everybody_is_told_what_became_of_each(found):
    for said in found["last"]:
        assert len(said) == 8 and all("no SGLang server is left" in one for one in said)
        assert all(one.count("http://") >= 2 for one in said)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_answers_go_on_over_new_weights_and_say_which_wrote_what(found, mode):
    for seen in found[mode]:
        assert seen["statuses"] == ["TRUNCATED"]
        assert seen["lengths"] == [LENGTH] * 8
        assert seen["versions"] == [[-1, 0]] * 8


def test_what_was_written_before_is_read_again_by_new_weights_or_it_is_not(found):
    """`retract` reads it again, so that log-probs are those of the new weights alone; `in_place` does not."""
    for retracted, in_place in zip(found["retract"], found["in_place"], strict=True):
        assert retracted["off"] < 1e-4
        assert in_place["off"] > 1e-3


def test_aborted_answers_end_with_what_they_have(found):
    for seen in found["abort"]:
        assert seen["statuses"] == ["ABORTED"]
        assert all(0 < length < LENGTH for length in seen["lengths"])
        assert seen["versions"] == [[-1]] * 8


def test_a_server_that_slept_is_asked_once_it_has_weights_again(found):
    slept = on_both(found, "asleep")
    assert slept["before"] == slept["after"] == {}
    assert "have no weights" in slept["asked while asleep"]
    assert slept["answers"] is True
