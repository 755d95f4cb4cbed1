"""The updates of several layouts with several arrivals, compared."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.arrival_order.arrivals import Arrival, updates
from tests.distributed.ranks import call_on_ranks

LAYOUTS = {
    "dp4": ("parallel=single",),
    "tp2-pp2": ("parallel=tp2_pp2",),
    "pp2-dp2": ("parallel=pp2",),
    "cp2-dp2": ("parallel=single", "parallel.context_parallel_size=2"),
}
"""Overrides of the configuration `class`, on four processes."""


@dataclass(frozen=True)
class Found:
    """Of one layout."""

    arrivals: int
    differing_bits: int
    """Of all arrivals, against the first."""
    error_to_one_process: float
    """Largest difference of a weight to that of one process, over the largest weight."""
    change: float
    """The same of the update itself: initial weights against updated ones of one process."""


def study(arrivals: dict[str, int], say: Callable[[str], None] = lambda text: None) -> dict[str, Found]:
    """Each layout with so many arrivals, from 1, 2 and 4 producing ranks in turn."""
    with tempfile.TemporaryDirectory() as folder:
        say("one process")
        alone = Arrival.drawn(0, 1)
        before, truth = call_on_ranks(updates, 1, ["parallel=single"], [None, alone], Path(folder))[0]
        found = {}
        for name, count in arrivals.items():
            say(f"{name}: {count} arrivals on 4 processes")
            drawn = [Arrival.drawn(number, 4) for number in range(count)]
            first, *others = call_on_ranks(updates, 4, list(LAYOUTS[name]), drawn, Path(folder), timeout=1800)[0]
            found[name] = Found(
                arrivals=count,
                differing_bits=sum(first.differing_bits(other) for other in others),
                error_to_one_process=first.largest_error(truth),
                change=before.largest_error(truth),
            )
    return found
