"""No bit of an update depends on the order in which answers arrive, nor on how many ranks generated them."""

import pytest

from tests.arrival_order.arrivals import PRODUCERS, Arrival
from tests.arrival_order.study import study

pytestmark = pytest.mark.distributed

ARRIVALS = {"dp4": 6, "tp2-pp2": 6, "pp2-dp2": 50, "cp2-dp2": 6}
"""`python -m tests.arrival_order` has 50 in every layout."""


def test_arrivals_come_from_one_two_and_four_ranks_in_many_orders():
    for count in ARRIVALS.values():
        drawn = [Arrival.drawn(number, 4) for number in range(count)]
        assert {len(set(arrival.producer_of.values())) for arrival in drawn} >= set(PRODUCERS)
        assert len({tuple(arrival.order) for arrival in drawn}) == count


@pytest.fixture(scope="module")
def found():
    return study(ARRIVALS)


@pytest.mark.parametrize("layout", ARRIVALS)
def test_no_bit_differs(found, layout):
    assert found[layout].differing_bits == 0


@pytest.mark.parametrize("layout", ARRIVALS)
def test_the_layout_matters_to_rounding_only(found, layout):
    assert found[layout].change > 1e-3, "the update must change something"
    assert found[layout].error_to_one_process <= 1e-6
