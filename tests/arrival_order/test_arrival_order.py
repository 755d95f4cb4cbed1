"""No bit of an update depends on the order in which answers arrive, nor on how many ranks generated them."""

import pytest

from tests.arrival_order.arrivals import PRODUCERS, Arrival
from tests.arrival_order.study import LAYOUTS, study

pytestmark = pytest.mark.distributed

ARRIVALS = 50


def test_arrivals_come_from_one_two_and_four_ranks_in_many_orders():
    drawn = [Arrival.drawn(number, 4) for number in range(ARRIVALS)]
    assert {len(set(arrival.producer_of.values())) for arrival in drawn} >= set(PRODUCERS)
    assert len({tuple(arrival.order) for arrival in drawn}) == ARRIVALS


@pytest.fixture(scope="module")
def found():
    return study(list(LAYOUTS), ARRIVALS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_differs(found, layout):
    assert found[layout].differing_bits == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_matters_to_rounding_only(found, layout):
    assert found[layout].change > 1e-3, "the update must change something"
    assert found[layout].error_to_one_process <= 1e-6
