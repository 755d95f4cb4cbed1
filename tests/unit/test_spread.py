"""Plans by shares fill every entry once and say the same as a plan that lists all sends; ranks share the work."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.errors import ModelError
from mppo.weights.sglang_layout import Worker
from mppo.weights.spread import Share, level, spread
from mppo.weights.transfer_plan import Layout, plan, whole_tensors
from mppo.weights.transports.routes import Message, Route, manifest
from mppo.weights.transports.spread_routes import SpreadRoutes
from tests.unit.layout_cases import Job, jobs, sglang_targets, whole_targets
from tests.unit.test_transfer_plan import X, empty, filled, line, made_up

pytestmark = pytest.mark.unit


@st.composite
def cases(draw) -> tuple[Job, Layout, tuple[Share, ...], int]:
    to_sglang = draw(st.booleans())
    job = draw(jobs(value_heads=not to_sglang))
    target = draw(sglang_targets(job) if to_sglang else whole_targets(job))
    largest = draw(st.sampled_from([1, 50, 1 << 20]))
    return job, target, spread(job.layout, target, largest), largest


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_entry_of_a_target_is_written_once_and_is_the_right_one(case):
    job, target, shares, _ = case
    whole = made_up(job.layout)
    sources = {rank: filled(holding, whole) for rank, holding in job.layout.holdings.items()}
    written = {holder: empty(holding) for holder, holding in target.holdings.items()}
    for send in (send for share in shares for send in share.sends()):
        slice_, there = send.read.view(sources[send.source]), send.write.view(written[send.target])
        assert slice_.shape == there.shape == send.shape
        assert (there == -1).all()
        there.copy_(slice_)
    for holder, holding in target.holdings.items():
        for region in holding.padding:
            region.view(written[holder]).zero_()
        expected = filled(holding, whole)
        assert all(torch.equal(written[holder][name], expected[name]) for name in expected)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_target_receives_and_copies_what_it_does_by_the_list_of_sends(case):
    job, target, shares, largest = case
    by_list: Counter = Counter()
    by_shares: Counter = Counter()
    for send in plan(job.layout, target, largest).sends:
        by_list[send.target, send.is_local] += send.bytes
    for share in shares:
        by_shares[share.target, share.is_local] += share.bytes
        assert share.bytes == sum(send.bytes for send in share.sends())
        assert all((s.source, s.target) == (share.source, share.target) for s in share.sends())
    assert by_shares == by_list


@settings(max_examples=100, deadline=None)
@given(cases())
def test_ranks_that_hold_the_same_send_within_one_send_of_their_mean(case):
    job, _, shares, largest = case
    sent = Counter({rank: 0 for rank in job.ranks})
    biggest = 0
    for send in (send for share in shares if not share.is_local for send in share.sends()):
        sent[send.source] += send.bytes
        biggest = max(biggest, send.bytes)
        assert send.bytes <= max(largest, send.bytes // send.shape[send.hf.dim])
    copies = {share.source for share in shares if share.is_local}
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for rank, holding in job.layout.holdings.items():
        alike[id(holding), rank in copies].append(sent[rank])
    for loads in alike.values():
        assert all(abs(load - sum(loads) / len(loads)) <= biggest for load in loads)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 3000))
def test_messages_are_the_share_in_order_and_bounded(case, limit):
    _, _, shares, _ = case
    for share in shares:
        parts = list(share.messages(limit))
        assert [send for part in parts for send in part.sends()] == share.sends()
        assert all(part.bytes <= limit or part.last - part.first == 1 for part in parts)


@given(st.integers(0, 1000), st.lists(st.integers(0, 300), min_size=1))
def test_the_smallest_loads_rise_together(amount, loads):
    given_ = level(amount, loads)
    assert sum(given_) == amount and min(given_) >= 0
    after = [load + more for load, more in zip(loads, given_, strict=True)]
    raised = [height for height, more in zip(after, given_, strict=True) if more]
    assert all(height <= min(after) + 1 for height in raised)


def test_what_nobody_holds_is_named():
    source = Layout(X, {0: line((0, 4)), 1: line((6, 10))})
    with pytest.raises(ModelError, match="no rank of the source holds entry 4 of x"):
        spread(source, whole_tensors(X, {0: ["x"]}))
    with pytest.raises(ModelError, match="no rank of the source holds y"):
        spread(source, whole_tensors({"y": X["x"]}, {0: ["y"]}))


def test_neighbours_serve_neighbours():
    """Four replicas and eight servers: each sends to two and each server has one sender."""
    same, own = line((0, 10)), line((0, 10))
    source = Layout(X, {rank: same for rank in range(4)})
    target = Layout(X, {Worker(server, 0): own for server in range(8)})
    found = [(share.source, share.target.server, share.bytes) for share in spread(source, target)]
    assert found == [(server // 2, server, 40) for server in range(8)]


def test_a_server_is_cut_where_replicas_are_more_than_servers():
    same = line((0, 10))
    source = Layout(X, {rank: same for rank in range(5)})
    shares = spread(source, Layout(X, {Worker(0, 0): line((0, 10))}), largest=4)
    assert [(share.source, share.first, share.last) for share in shares] == [(r, 2 * r, 2 * r + 2) for r in range(5)]


@st.composite
def routed(draw) -> tuple[Job, Layout, SpreadRoutes, int]:
    job = draw(jobs(value_heads=False))
    target, buffer = draw(sglang_targets(job)), draw(st.sampled_from([100, 1000, 1 << 20]))
    return job, target, SpreadRoutes.of(job.layout, target, buffer), buffer


def ends(route: Route, of: Callable[[Message], object]) -> list[list[object]]:
    return [[of(message) for message in messages] for messages in route.rounds]


@settings(max_examples=60, deadline=None)
@given(routed())
def test_routes_hold_all_sends_in_rounds_of_one_message_for_each_end(case):
    job, target, routes, buffer = case
    made = {server: routes.route(server) for server in routes.of_server}
    assert set(made) == {worker.server for worker in target.holdings}
    for server, route in made.items():
        assert all(route.rounds)
        for per_round in (ends(route, lambda m: m.source), ends(route, lambda m: m.worker)):
            assert all(len(set(found)) == len(found) for found in per_round)
        sends = [send for messages in route.rounds for m in messages for send in m.sends]
        assert Counter(sends) == Counter(send for share in routes.of_server[server] for send in share.sends())
        assert route.workers == sum(worker.server == server for worker in target.holdings)
        assert set(route.senders) == {send.source for send in sends}
        for rank in range(route.workers):
            parts = [p for r in manifest(route, target, rank)["rounds"] for m in r for p in m["parts"]]
            assert len(parts) == sum(send.target == Worker(server, rank) for send in sends)
    most = 0
    for rank in job.ranks:
        assert routes.servers_of(rank) == [server for server, route in made.items() if rank in route.senders]
        most = max(most, len(routes.servers_of(rank)))
    assert 2 * most * routes.bucket_bytes <= buffer
    rows = [
        send.bytes // send.shape[send.hf.dim] for r in made.values() for ms in r.rounds for m in ms for send in m.sends
    ]
    assert all(m.bytes <= max(routes.bucket_bytes, *rows) for r in made.values() for ms in r.rounds for m in ms)
