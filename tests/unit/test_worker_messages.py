"""What ranks pack, taken in by the receiver that runs inside SGLang's workers, without connections between them."""

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mppo.rollout.engines.sglang.in_worker import mppo_receiver
from mppo.weights.sglang_layout import Worker
from mppo.weights.transfer_plan import Holding, Layout, Region, Send
from mppo.weights.transports import worker_link
from mppo.weights.transports.routes import ALONE_BYTES, Message, Route, manifest
from mppo.weights.transports.spread_routes import SpreadRoutes
from mppo.weights.transports.worker_link import LastSent, Packed, Traffic
from tests.unit.layout_cases import Job, jobs, sglang_targets

pytestmark = pytest.mark.unit

SECOND = timedelta(seconds=1)
DTYPE = torch.bfloat16


def made_up(layout: Layout, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in layout.tensors.items()}


def filled(holding: Holding, whole: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    own = {name: torch.zeros(shape, dtype=dtype) for name, shape in holding.shapes.items()}
    for piece in holding.pieces:
        piece.own.view(own).copy_(piece.hf.view(whole))
    return own


class Wire:
    """Stands where connections are: what was packed for a worker, by the rank it comes from."""

    device = torch.device("cpu")
    timeout = SECOND

    def __init__(self, alone_bytes: int = ALONE_BYTES):
        self.alone_bytes = alone_bytes
        self.sent: dict[int, deque[Tensor]] = {}

    def send(self, source: int, packed: Packed) -> None:
        self.sent.setdefault(source, deque()).extend(b for b in packed.buffers if b.numel())

    def take(self, buffer: Tensor, source: int) -> SimpleNamespace:
        buffer.copy_(self.sent[source].popleft())
        return SimpleNamespace(wait=lambda timeout: None)


def carry(route: Route, target: Layout, sources, workers, since: dict[int, LastSent] | None, share: float) -> Traffic:
    """All messages of a route, parts of 32 bytes alone; returns what was sent."""
    with patch.object(worker_link, "ALONE_BYTES", 32):
        return _carried(route, target, sources, workers, since, share)


def _carried(route, target, sources, workers, since, share) -> Traffic:
    wires, traffic = {rank: Wire(alone_bytes=32) for rank in range(route.workers)}, Traffic()
    for messages in route.rounds:
        for message in messages:
            last = None if since is None else since[message.source]
            packed = Packed(message, sources[message.source], last, share)
            wires[message.worker.tp_rank].send(route.place(message.source), packed)
            traffic += packed.traffic
    received = 0
    for rank, wire in wires.items():
        parameters = workers[Worker(route.server, rank)]
        for messages in manifest(route, target, rank)["rounds"]:
            for message in messages:
                payload = mppo_receiver.Payload(wire, parameters, message, since is None)
                received += payload.write(SECOND)
        assert not any(wire.sent.values()), "something was sent that nobody took"
    assert received == traffic.bytes
    return traffic


def routes(job: Job, target: Layout, buffer: int) -> dict[int, Route]:
    made = SpreadRoutes.of(job.layout, target, buffer)
    return {server: made.route(server) for server in made.of_server}


@st.composite
def cases(draw) -> tuple[Job, Layout, int]:
    job = draw(jobs(value_heads=False))
    return job, draw(sglang_targets(job)), draw(st.sampled_from([8, 100, 1 << 20]))


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 5))
def test_workers_hold_the_weights_after_whole_ones_and_after_deltas(case, share, seed):
    job, target, bucket = case
    whole = made_up(job.layout, seed)
    dtype = next(iter(job.layout.tensors.values())).dtype
    sources = {rank: filled(holding, whole, dtype) for rank, holding in job.layout.holdings.items()}
    workers = {worker: filled(holding, whole, DTYPE) for worker, holding in target.holdings.items()}
    for parameters in workers.values():
        for tensor in parameters.values():
            tensor.fill_(torch.nan)
    since = {rank: LastSent() for rank in sources}
    made = routes(job, target, bucket)
    for number, every in enumerate([None, 7, 3, 1]):
        if every is not None:
            for tensor in whole.values():
                tensor.view(-1)[::every] += 1.0
        sources = {rank: filled(holding, whole, dtype) for rank, holding in job.layout.holdings.items()}
        for route in made.values():
            carry(route, target, sources, workers, since if number else None, share)
        for route in made.values():
            for rank in route.senders:
                since[rank].keep(route, rank, sources[rank])
        for worker, holding in target.holdings.items():
            expected = filled(holding, whole, DTYPE)
            for region in holding.padding:
                region.view(workers[worker]).zero_()
            assert all(torch.equal(workers[worker][name], expected[name]) for name in expected)


def one_part(now: Tensor, last: Tensor | None, share: float = 0.5) -> tuple[Packed, Tensor]:
    """A part of three rows and the middle columns of a parameter, and the parameter after it has come."""
    region = Region("w", 1, 1, 1 + now.size(1))
    send = Send(0, Worker(0, 0), region, Region("w", 1, 0, now.size(1)), region, tuple(now.shape), now.dtype)
    message, since = Message(0, send.target, (send,)), None
    route = Route(0, 1, ((message,),), (0,))
    held = torch.zeros(now.size(0), now.size(1) + 2, dtype=now.dtype)
    if last is not None:
        since = LastSent()
        since.keep(route, 0, {"w": last})
        region.view({"w": held}).copy_(last)
    wire = Wire()
    packed = Packed(message, {"w": now}, since, share)
    wire.send(0, packed)
    parts = {"from": 0, "parts": [["w", None, 1, 1, 1 + now.size(1)]]}
    mppo_receiver.Payload(wire, {"w": held}, parts, since is None).write(SECOND)
    return packed, held


def test_a_delta_of_nothing_is_a_header():
    now = torch.randn(3, 4, dtype=DTYPE)
    packed, held = one_part(now, now.clone())
    assert (packed.traffic.bytes, packed.traffic.changed, packed.traffic.entries) == (4, 0, 12)
    assert torch.equal(held[:, 1:5], now)


def test_what_differs_in_bits_has_changed_and_nothing_else():
    """-0.0 is not 0.0 to a worker's bytes; a NaN that stays is the same."""
    last = torch.zeros(3, 4, dtype=DTYPE)
    last[2, 3] = torch.nan
    now = last.clone()
    now[0, 1] = -0.0
    packed, held = one_part(now, last)
    assert packed.traffic.changed == 1
    assert packed.traffic.bytes == 4 + 4 + 2
    assert torch.equal(held[:, 1:5].view(torch.int16), now.view(torch.int16))
    assert (held[:, 0] == 0).all() and (held[:, 5] == 0).all()


def test_a_part_of_which_much_changed_is_sent_whole():
    last = torch.zeros(3, 4)
    now = last.clone()
    now[:2] = 1.0
    packed, held = one_part(now, last, share=0.5)
    assert packed.traffic.bytes == 4 + 12 * 4
    assert torch.equal(held[:, 1:5], now)


def test_a_worker_refuses_a_manifest_that_is_not_its_own():
    parameters = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    good = {
        "dtype": "torch.float32",
        "shapes": {"a": [2, 3], "b": [4]},
        "padding": [["b", None, 0, 3, 4]],
        "rounds": [[{"from": 0, "parts": [["a", None, 0, 0, 2], ["b", None, 0, 0, 3]]}]],
    }
    mppo_receiver.check(parameters, good)
    assert parameters["b"].tolist() == [1, 1, 1, 0], "padding is zero"
    for field, value, said in (
        ("shapes", {"a": [2, 3], "b": [5]}, "holds b as"),
        ("shapes", {"a": [2, 3]}, "1 parameters differ"),
        ("dtype", "torch.bfloat16", "the trainer sends torch.bfloat16"),
        ("padding", [], "fills 9 entries of 10"),
    ):
        with pytest.raises(ValueError, match=said):
            mppo_receiver.check(parameters, good | {field: value})
