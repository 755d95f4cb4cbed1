"""Plans from any layout of the trainer to whole tensors and to SGLang's workers, carried out on made-up tensors."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3MoeConfig

from mppo.errors import ModelError
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Sizes
from mppo.weights.architectures import architecture_of
from mppo.weights.export import weight_files
from mppo.weights.live_weights import LocalParameter, check_agreement
from mppo.weights.megatron_layout import even_stages, megatron_layout
from mppo.weights.transfer_plan import HFTensor, Holding, Layout, Piece, Plan, Region, plan, whole_tensors
from tests.distributed.model_folders import COMMON, EXPERTS
from tests.unit.layout_cases import Job, jobs, sglang_targets, whole_targets

pytestmark = pytest.mark.unit

UNWRITTEN = -1


def sized(hf) -> ModelConfig:
    return architecture_of(hf).model_config(hf)


def made_up(layout: Layout) -> dict[str, Tensor]:
    """Every entry of the model has a number of its own."""
    whole, first = {}, 0
    for name, tensor in layout.tensors.items():
        entries = torch.Size(tensor.shape).numel()
        whole[name] = torch.arange(first, first + entries).view(tensor.shape)
        first += entries
    return whole


def empty(holding: Holding) -> dict[str, Tensor]:
    return {name: torch.full(shape, UNWRITTEN) for name, shape in holding.shapes.items()}


def filled(holding: Holding, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """A holder's parameters, straight from the definition of a piece."""
    own = empty(holding)
    for piece in holding.pieces:
        piece.own.view(own).copy_(piece.hf.view(whole))
    for region in holding.padding:
        region.view(own).zero_()
    return own


@st.composite
def cases(draw) -> tuple[Job, Layout, Plan, int]:
    to_sglang = draw(st.booleans())
    job = draw(jobs(value_heads=not to_sglang))
    target = draw(sglang_targets(job) if to_sglang else whole_targets(job))
    largest = draw(st.sampled_from([1, 50, 1 << 20]))
    return job, target, plan(job.layout, target, largest), largest


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_entry_of_a_target_is_written_once_and_is_the_right_one(case):
    job, target, made, _ = case
    whole = made_up(job.layout)
    sources = {rank: filled(holding, whole) for rank, holding in job.layout.holdings.items()}
    written = {holder: empty(holding) for holder, holding in target.holdings.items()}
    for send in made.sends:
        slice_, there = send.read.view(sources[send.source]), send.write.view(written[send.target])
        assert slice_.shape == there.shape == send.shape
        assert (there == UNWRITTEN).all()
        assert torch.equal(slice_, send.hf.view(whole))
        there.copy_(slice_)
    for holder, holding in target.holdings.items():
        for region in holding.padding:
            there = region.view(written[holder])
            assert (there == UNWRITTEN).all()
            there.zero_()
        expected = filled(holding, whole)
        assert all(torch.equal(written[holder][name], expected[name]) for name in expected)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_parameter_is_all_pieces_and_padding_and_the_ranks_have_the_whole_model(case):
    job, target, _, _ = case
    for holding in [*job.layout.holdings.values(), *target.holdings.values()]:
        times = {name: torch.zeros(shape) for name, shape in holding.shapes.items()}
        for region in [*holding.padding, *(piece.own for piece in holding.pieces)]:
            region.view(times).add_(1)
        assert all((count == 1).all() for count in times.values())
    for layout in (job.layout, target):
        held = {name: torch.zeros(tensor.shape) for name, tensor in layout.tensors.items()}
        for holding in layout.holdings.values():
            for piece in holding.pieces:
                piece.hf.view(held).add_(1)
        assert all((count > 0).all() for count in held.values())


@settings(max_examples=60, deadline=None)
@given(cases())
def test_only_what_a_target_does_not_hold_travels(case):
    job, target, made, _ = case
    received = Counter()
    for send in made.sends:
        if not send.is_local:
            received[send.target] += send.bytes
    for holder, holding in target.holdings.items():
        missing = 0
        held = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in job.layout.tensors.items()}
        if holder in job.layout.holdings:
            for piece in job.layout.holdings[holder].pieces:
                piece.hf.view(held)[:] = True
        for piece in holding.pieces:
            size = min(layout.tensors[piece.hf.name].dtype.itemsize for layout in (job.layout, target))
            missing += size * int((~piece.hf.view(held)).sum())
        assert received[holder] == missing


@settings(max_examples=60, deadline=None)
@given(cases())
def test_ranks_that_hold_the_same_send_the_same_but_for_one_slice(case):
    job, target, made, largest = case
    sent = Counter({rank: 0 for rank in job.ranks})
    biggest = 0
    for send in made.sends:
        if not send.is_local:
            sent[send.source] += send.bytes
            biggest = max(biggest, send.bytes)
            row = send.bytes // send.shape[send.hf.dim]
            assert send.bytes <= max(largest, row)
    alike: dict[int, list[int]] = {}
    for rank, holding in job.layout.holdings.items():
        alike.setdefault(id(holding), []).append(rank)
    for ranks in alike.values():
        loads = [sent[rank] for rank in ranks]
        assert max(loads) - min(loads) <= biggest
        assert max(loads) <= sum(loads) / len(loads) + biggest


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1, 100, 1 << 20]))
def test_rounds_are_bounded_for_senders_and_receivers(case, limit):
    _, _, made, _ = case
    rounds, travelling = made.rounds(limit), [send for send in made.sends if not send.is_local]
    assert all(rounds)
    assert Counter(send for sends in rounds for send in sends) == Counter(travelling)
    busiest, biggest = 0, max((send.bytes for send in travelling), default=0)
    for end in ("source", "target"):
        total: Counter = Counter()
        for sends in rounds:
            of_end: dict = {}
            for send in sends:
                of_end.setdefault(getattr(send, end), []).append(send.bytes)
                total[getattr(send, end)] += send.bytes
            assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in of_end.values())
        busiest = max([busiest, *total.values()])
    if biggest and biggest <= limit // 16:
        assert len(rounds) <= 2 + 3 * busiest // limit


@settings(max_examples=30, deadline=None)
@given(jobs(), st.integers(1, 2000))
def test_every_tensor_is_in_one_file_and_a_round_of_files_has_every_writer_once(job, largest):
    files = weight_files(job.layout, largest)
    assert [name for file in files for name in file.tensors] == list(job.layout.tensors)
    for start in range(0, len(files), len(job.ranks)):
        writers = [file.writer for file in files[start : start + len(job.ranks)]]
        assert len(set(writers)) == len(writers)
    for file in files:
        sizes = [job.layout.tensors[name].bytes for name in file.tensors]
        assert sum(sizes) <= largest or len(sizes) == 1


def line(*intervals: tuple[int, int]) -> Holding:
    """Holds these entries of a vector `x` one after the other."""
    pieces, start = [], 0
    for a, b in intervals:
        pieces.append(Piece(Region("x", 0, a, b), Region("own", 0, start, start + b - a)))
        start += b - a
    return Holding({"own": (start,)}, tuple(pieces))


X = {"x": HFTensor((10,), 0, torch.float32)}


def test_a_plan_by_hand():
    """Rank 0 keeps what it has; rank 2 gets one interval from each of two ranks."""
    source = Layout(X, {0: line((0, 6)), 1: line((4, 10))})
    target = Layout(X, {0: line((2, 6)), 2: line((3, 8))})
    sends = plan(source, target).sends
    found = [(s.source, s.target, (s.hf.start, s.hf.stop), s.read.start, s.write.start) for s in sends]
    assert found == [
        (0, 0, (2, 4), 2, 0),
        (0, 0, (4, 6), 4, 2),
        (0, 2, (3, 4), 3, 0),
        (1, 2, (4, 6), 0, 1),
        (1, 2, (6, 8), 2, 3),
    ]


def test_replicas_of_a_mixture_of_experts():
    """TP 2 x CP 2 x DP 2 with EP 4: two ranks hold an expert, eight a norm, four each half of the queries."""
    model = sized(Qwen3MoeConfig(**COMMON, **EXPERTS))
    sizes = Sizes(tp=2, pp=1, vpp=None, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True)
    qwen3_moe = architecture_of(Qwen3MoeConfig())
    layout = megatron_layout(qwen3_moe.rows(model), model, sizes, even_stages(4, 1, None), torch.bfloat16)

    def holders(name: str) -> list[tuple[int, int, int]]:
        return [
            (rank, piece.hf.start, piece.hf.stop)
            for rank, holding in layout.holdings.items()
            for piece in holding.pieces
            if piece.hf.name == "model.layers.1." + name
        ]

    assert holders("mlp.experts.2.down_proj.weight") == [(2, 0, 24), (6, 0, 24)]
    assert holders("self_attn.q_norm.weight") == [(rank, 0, 32) for rank in range(8)]
    assert holders("self_attn.q_proj.weight") == [(rank, 64 * (rank % 2), 64 * (rank % 2) + 64) for rank in range(8)]


def test_chunks_that_hold_something_else_than_their_layout_are_refused():
    model = sized(Qwen3MoeConfig(**COMMON, **EXPERTS))
    norm = architecture_of(Qwen3MoeConfig()).parameters[1]
    sizes = Sizes(tp=1, pp=1, vpp=None, cp=1, dp=1, ep=1, etp=1, sequence_parallel=False)
    layout = megatron_layout((norm,), model, sizes, even_stages(4, 1, None), torch.float32)

    def local(size: int, dtype: torch.dtype = torch.float32) -> list[LocalParameter]:
        return [LocalParameter(norm, -1, -1, torch.zeros(size, dtype=dtype))]

    check_agreement(layout, local(64), rank=0)
    with pytest.raises(ModelError, match=r"rank 0 holds decoder.final_layernorm.weight of shape \(3,\)"):
        check_agreement(layout, local(3), rank=0)
    with pytest.raises(ModelError, match="torch.bfloat16"):
        check_agreement(layout, local(64, torch.bfloat16), rank=0)


def test_what_nobody_holds_is_named():
    source = Layout(X, {0: line((0, 4)), 1: line((6, 10))})
    with pytest.raises(ModelError, match="no rank of the source holds entry 4 of x"):
        plan(source, whole_tensors(X, {0: ["x"]}))
    with pytest.raises(ModelError, match="no rank of the source holds y"):
        plan(source, whole_tensors({"y": X["x"]}, {0: ["y"]}))


def test_tensors_cut_along_different_dimensions_are_refused():
    source = whole_tensors({"x": HFTensor((4, 4), 0, torch.float32)}, {0: ["x"]})
    target = whole_tensors({"x": HFTensor((4, 4), 1, torch.float32)}, {1: ["x"]})
    with pytest.raises(ModelError, match="x is cut along dim 0 by the source, 1 by the target"):
        plan(source, target)


def test_chunks_of_a_virtual_pipeline_go_round():
    assert even_stages(8, 2, 2) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert even_stages(4, 2, None) == (((0, 1),), ((2, 3),))
