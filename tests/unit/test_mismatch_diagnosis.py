"""The diagnosis of evidence that follows from a model of a few numbers: one cause at a time, and none."""

from dataclasses import replace

import pytest
import torch

from mppo.batch.trajectory import Span, TrajectoryId
from mppo.mismatch.diagnosis import diagnose
from mppo.mismatch.evidence import Scored
from mppo.mismatch.finding import Cause
from mppo.mismatch.hypotheses import Change, Head
from mppo.mismatch.weight_findings import orders
from mppo.weights.checksums import checksum
from tests.unit.mismatch_cases import DOWN, EMBEDDING, HEAD, MODEL, QKV, VERSION, VOCABULARY, Case, clean

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_found_where_nothing_is_wrong(seed):
    assert clean(seed, temperature=[0.7, 1.0, 1.3][seed % 3]).causes() == []


def other(case: Case, **checksums: str) -> Case:
    return case.with_server(checksums={**case.evidence.servers[0].checksums, **checksums})


def test_a_tensor_that_is_as_before_is_stale():
    case = clean(0)
    finding = other(case, **{DOWN: case.evidence.servers[0].before[DOWN]}).the_finding()
    assert (finding.cause, finding.place.tensor) == (Cause.STALE_TENSOR, DOWN[2:])
    assert finding.place.worker == "server 0, worker 0" and finding.proved


def test_a_tensor_that_never_was_there_is_wrong():
    assert other(clean(0), **{DOWN: "0" * 16}).causes() == [Cause.WRONG_TENSOR]


def test_without_what_was_before_both_are_said():
    finding = other(clean(0), **{DOWN: "0" * 16}).with_server(before={}).the_finding()
    assert finding.cause is Cause.STALE_TENSOR and not finding.proved and finding.or_else == (Cause.WRONG_TENSOR,)


@pytest.mark.parametrize("number", range(8))
def test_heads_in_another_order_are_found(number):
    case = clean(1)
    order, tensor = list(orders(case.numbers.parameters[QKV], MODEL))[number]
    finding = other(case, **{QKV: checksum(tensor)}).the_finding()
    assert (finding.cause, finding.place.tensor, finding.detail) == (Cause.SWAPPED_QKV, QKV[2:], order)


def test_what_one_message_had_to_change_is_lost_with_it():
    case = clean(2)
    before = case.evidence.servers[0].before
    finding = other(case, **{QKV: before[QKV], DOWN: before[DOWN]}).the_finding()
    assert (finding.cause, finding.detail) == (Cause.LOST_BUCKET, "message 1")


def test_of_a_lost_message_only_what_changed_differs():
    """With one parameter left it may be stale by itself."""
    case = clean(2)
    before = {**case.evidence.servers[0].before, QKV: case.evidence.expected.checksums[QKV]}
    found = other(case.with_server(before=before), **{DOWN: before[DOWN]}).causes()
    assert found == [Cause.STALE_TENSOR]


def test_two_tensors_of_different_messages_are_each_stale():
    """And nothing is said of numbers that wrong weights explain."""
    case = clean(2)
    before = case.evidence.servers[0].before
    case = other(case.engine_is(Change(rope_theta=2e4)), **{QKV: before[QKV], HEAD: before[HEAD]})
    assert case.causes() == [Cause.STALE_TENSOR, Cause.STALE_TENSOR]


def test_of_other_weights_no_tensor_is_named_by_itself():
    case = clean(2).engine_is(Change(rope_theta=2e4))
    finding = other(case, **dict.fromkeys((QKV, DOWN, EMBEDDING, HEAD), "0" * 16)).with_server(before={}).the_finding()
    assert finding.cause is Cause.OTHER_WEIGHTS and "4 of 4" in finding.shown


def test_padding_differs_where_no_log_prob_does():
    finding = other(clean(3), **{HEAD: "0" * 16}).the_finding()
    assert (finding.cause, finding.place.tensor, finding.proved) == (Cause.PADDING, HEAD[2:], True)


def test_an_embedding_that_is_not_tied_may_be_stale_where_no_token_looks():
    finding = other(clean(3), **{EMBEDDING: "0" * 16}).the_finding()
    assert finding.cause is Cause.PADDING and not finding.proved and finding.or_else == (Cause.STALE_TENSOR,)


def test_an_engine_with_a_head_of_its_own_in_a_tied_model():
    case = other(clean(4, model=replace(MODEL, tie_word_embeddings=True)), **{HEAD: "0" * 16})
    assert case.the_finding().cause is Cause.UNTIED_HEAD and case.the_finding().place.tensor == HEAD[2:]


def test_a_version_that_was_not_given():
    def old(scored: Scored, number: int):
        spans = (Span(0, 5, VERSION), Span(5, 6, VERSION - 1))
        return {"calls": (replace(scored.calls[0], spans=spans),)} if number == 2 else {}

    finding = clean(5).with_each(old).the_finding()
    start = clean(5).evidence.trajectories[2].calls[0].start
    assert (finding.cause, finding.place.trajectory) == (Cause.VERSION, TrajectoryId(2, 0))
    assert finding.place.token == start + 5
    assert clean(5).with_server(version="1").causes() == [Cause.VERSION]


def test_ids_that_the_engine_did_not_write():
    def another(scored: Scored, number: int):
        ids = scored.token_ids.clone()
        ids[scored.calls[0].start + 3] = (ids[scored.calls[0].start + 3] + 1) % VOCABULARY
        return {"token_ids": ids} if number == 1 else {}

    finding = clean(6).with_each(another).the_finding()
    assert (finding.cause, finding.place.turn) == (Cause.RETOKENISED, 1)
    assert finding.place.token == clean(6).evidence.trajectories[1].calls[0].start + 3


@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_that_is_off_by_one(by):
    def shifted(scored: Scored, number: int):
        start = scored.calls[0].start + by
        mask = torch.arange(len(scored.token_ids)) >= start
        if by < 0:
            mask[-1] = False
        return {"action_mask": mask, "trained": torch.where(mask, scored.reference, 0.0)}

    finding = clean(7).with_each(shifted).the_finding()
    assert (finding.cause, finding.detail) == (Cause.MASK, by)


def test_a_mask_with_holes_is_named_too():
    def holed(scored: Scored, number: int):
        mask = scored.action_mask.clone()
        mask[-2] = False
        return {"action_mask": mask}

    assert clean(7).with_each(holed).causes() == [Cause.OTHER_MASK]


@pytest.mark.parametrize("by", [-1, 1])
def test_log_probs_of_the_neighbours(by):
    """In the trajectory, or out of the trainer."""
    case = clean(8)
    moved = case.with_each(lambda s, n: {"rollout_log_probs": torch.roll(s.reported.nan_to_num(), by)})
    assert moved.causes() == [Cause.MASK]
    assert case.with_each(lambda s, n: {"trained": torch.roll(s.reference, by)}).causes() == [Cause.MASK]


def test_cached_prefixes_that_are_stale():
    def stale(scored: Scored, number: int):
        return {"salted": scored.salted + 0.3} if number == 4 else {}

    finding = clean(9).with_each(stale).the_finding()
    assert (finding.cause, finding.place.trajectory) == (Cause.STALE_PREFIX, TrajectoryId(4, 0))
    assert finding.place.token == clean(9).evidence.trajectories[4].calls[0].start


def test_a_temperature_is_fitted():
    case = clean(10)
    finding = case.reported(case.numbers.score(Change(temperature=0.77))).the_finding()
    assert finding.cause is Cause.TEMPERATURE and finding.detail == pytest.approx(0.77, abs=1e-3)
    assert finding.place.token is not None


def test_a_temperature_that_both_sides_were_told_differently():
    case = clean(10)
    told = case.reported(case.numbers.score(Change(temperature=0.5)), temperature=0.5)
    assert told.the_finding().cause is Cause.TEMPERATURE and told.the_finding().detail == 0.5


@pytest.mark.parametrize("seed", range(4))
def test_unlikely_tokens_that_never_occur(seed):
    finding = clean(seed, kept=0.6).the_finding()
    assert finding.cause is Cause.TOP_P and 0.55 < finding.detail < 0.75


@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_are_never_beyond_the_likeliest_few(seed):
    finding = clean(seed, k=12).the_finding()
    assert finding.cause is Cause.TOP_K and 10 <= finding.detail <= 12


def test_top_p_that_was_asked_for():
    case = clean(11)
    scores = case.numbers.score(Change())
    assert case.reported(scores, top_p=0.9).the_finding().detail == 0.9


def test_log_probs_that_are_renormalised():
    case = clean(12)
    draw = torch.Generator().manual_seed(0)
    scores = [x + 0.4 * torch.rand(x.shape, generator=draw) for x in case.numbers.score(Change())]
    assert case.reported(scores).the_finding().cause is Cause.TOP_P


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (Change(head=Head.BFLOAT16), Cause.BF16_HEAD),
        (Change(head=Head.PADDED), Cause.PADDING),
        (Change(head=Head.EMBEDDING), Cause.UNTIED_HEAD),
        (Change(rope_theta=31415.0), Cause.ROPE),
        (Change(rms_norm_eps=4.2e-4), Cause.EPSILON),
    ],
)
def test_an_engine_that_computes_otherwise(change, cause):
    """Its configuration cannot be read; base and epsilon are found though no search begins with them."""
    finding = clean(13).engine_is(change).with_server(model=None).the_finding()
    assert finding.cause is cause and finding.place.tensor and finding.place.token is not None
    if change.rope_theta is not None:
        assert finding.detail == pytest.approx(change.rope_theta, rel=0.02)


@pytest.mark.parametrize("head", [Head.BFLOAT16, Head.PADDED])
def test_a_trainer_whose_head_is_another(head):
    case = clean(14)
    scores = case.numbers.score(Change(head=head))
    finding = case.with_each(lambda s, n: {"trained": torch.where(s.action_mask, scores[n], 0.0)}).the_finding()
    assert finding.cause is {Head.BFLOAT16: Cause.BF16_HEAD, Head.PADDED: Cause.PADDING}[head]
    assert finding.place.worker == "trainer"


def test_a_configuration_that_the_server_read_otherwise():
    case = clean(15)
    for fields, cause in (
        ({"rope_theta": 5e5}, Cause.ROPE),
        ({"rms_norm_eps": 1e-6}, Cause.EPSILON),
        ({"norm_topk_prob": True}, Cause.MODEL),
    ):
        change = Change(**{k: v for k, v in fields.items() if k != "norm_topk_prob"})
        told = case.engine_is(change).with_server(model=replace(MODEL, **fields))
        assert told.the_finding().cause is cause


def test_what_nothing_explains_is_said():
    draw = torch.Generator().manual_seed(0)
    noisy = clean(16).with_each(
        lambda s, n: {"prefill": s.prefill + 0.5 * torch.randn(s.prefill.shape, generator=draw), "salted": s.salted}
    )
    noisy = noisy.with_each(lambda s, n: {"salted": torch.where(s.salted.isnan(), torch.nan, s.prefill)})
    finding = next(f for f in diagnose(noisy.evidence, noisy.numbers) if f.cause is Cause.UNEXPLAINED)
    assert finding.place.trajectory is not None and not finding.proved


def test_a_score_that_is_not_a_number_agrees_with_nothing():
    broken = clean(17).with_each(lambda s, n: {"reference": torch.full_like(s.reference, torch.nan)})
    broken.numbers.logits = [torch.full_like(z, torch.nan) for z in broken.numbers.logits]
    assert Cause.UNEXPLAINED in broken.causes()


def test_a_clean_diagnosis_asks_for_few_passes():
    case = clean(18)
    before = case.numbers.passes
    case.causes()
    assert case.numbers.passes - before <= 4
