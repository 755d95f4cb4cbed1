"""Dividing work evenly: what a sequence costs, and which sequences go together so that all parts cost the same.

Plain Python numbers, added in a fixed order, so that ranks on different machines find the same division.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

TOLERANCE = 1e-3
"""A division is good enough when its heaviest part is this much over the mean or the largest item, relative."""
EXCHANGES_PER_PART = 20
"""At most; one or two are usual."""
PARTNERS = 16
"""Lightest parts that the heaviest looks for an exchange with; more of them gain little and take long."""
LEAST_GAIN = 1e-9
"""An exchange must make the heaviest part lighter by more than rounding does, relative."""
BISECTIONS = 6
"""Capacities that are tried where exchanges alone are not good enough."""

Item = tuple[float, int]
"""Size, in workload or tokens, and index."""
NOTHING = (0.0, -1)
"""What the lighter part gives back when an item simply moves."""


class TransformerSizes(Protocol):
    """What the cost of a decoder-only transformer with a gated feed-forward layer depends on."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_query_groups(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def active_ffn_size(self) -> int:
        """Feed-forward columns that a token goes through: of one layer, or of the experts that it is sent to."""
        ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class WorkloadModel:
    """What a forward pass over a sequence of L tokens costs: `linear * L + attention * L^2`, in FLOPs.

    A backward pass costs twice as much for both terms, so that the balance is the same.
    """

    linear: float
    """A token: every weight multiplies it."""
    attention: float
    """A token squared: scores and sums of values, over the half of all pairs that a causal mask leaves."""

    @classmethod
    def of(cls, model: TransformerSizes, projected: float = 1.0) -> "WorkloadModel":
        """`projected` is the share of tokens whose logits are computed: the actions."""
        heads = model.num_attention_heads * model.head_dim
        key_values = model.num_query_groups * model.head_dim
        layer = model.hidden_size * (2 * heads + 2 * key_values + 3 * model.active_ffn_size)
        weights = model.num_layers * layer + projected * model.hidden_size * model.vocab_size
        return cls(linear=2.0 * weights, attention=2.0 * model.num_layers * heads)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.attention * length * length


def balanced_parts(indices: Iterable[int], workloads: Sequence[float], count: int) -> list[list[int]]:
    """Divide `indices` into `count` parts of nearly equal total workload, some of them empty if need be.

    Greedy first: heaviest first to the lightest part (ties: to the one with fewer items). Then the heaviest part
    exchanges an item for a lighter one, or for nothing, with the lightest part where that helps. Where that leaves it
    over TOLERANCE, the same starts from best fit into parts of a capacity, which is bisected: that leaves alone the
    items that nearly fill a part. So the heaviest part is never heavier than by greed, and no two parts differ by more
    than the largest workload. Indices in a part are sorted.
    """
    items = sorted(((workloads[i], i) for i in indices), key=lambda item: (-item[0], item[1]))
    largest = items[0][0] if items else 0.0
    enough = (1 + TOLERANCE) * max(sum(load for load, _ in items) / count, largest)
    best, low = _Division(_greedy(items, count)).refined(enough), enough
    for _ in range(BISECTIONS):
        if best.heaviest <= enough:
            break
        capacity = (low + best.heaviest) / 2
        packed = best_fit(items, capacity)
        division = None
        if len(packed) <= count:
            division = _Division(packed + [[] for _ in range(count - len(packed))]).refined(enough)
        if division and division.heaviest < best.heaviest and division.heaviest - division.lightest <= largest:
            best = division
        else:
            low = capacity
    return best.indices()


def best_fit(descending: Iterable[Item], capacity: float) -> list[list[Item]]:
    """As few bins as it takes if each item goes to the fullest one that still has room for it."""
    rooms: list[Item] = []  # ascending: room, bin
    bins: list[list[Item]] = []
    for item in descending:
        place = bisect_left(rooms, (item[0], -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        insort(rooms, (room - item[0], number))
    return bins


def _greedy(descending: list[Item], count: int) -> list[list[Item]]:
    parts: list[list[Item]] = [[] for _ in range(count)]
    heap = [(0.0, 0, part) for part in range(count)]
    for item in descending:
        load, held, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + item[0], held + 1, part))
    return parts


class _Division:
    """Items in parts, which exchange them."""

    def __init__(self, parts: list[list[Item]]):
        self._parts = [[NOTHING, *sorted(part)] for part in parts]  # NOTHING sorts before every item
        self._ascending = sorted((sum(load for load, _ in part), number) for number, part in enumerate(parts))

    @property
    def heaviest(self) -> float:
        return self._ascending[-1][0]

    @property
    def lightest(self) -> float:
        return self._ascending[0][0]

    def indices(self) -> list[list[int]]:
        return [sorted(index for _, index in part[1:]) for part in self._parts]

    def refined(self, enough: float) -> "_Division":
        """Itself, after exchanges until the heaviest part has at most `enough`, or none makes it lighter."""
        for _ in range(EXCHANGES_PER_PART * len(self._parts)):
            if self.heaviest <= enough or not self._relieve_heaviest():
                break
        return self

    def _relieve_heaviest(self) -> bool:
        """Make one exchange with the lightest part that helps; False if none of PARTNERS does."""
        load, heavy = self._ascending[-1]
        for place, (other_load, light) in enumerate(self._ascending[:-1][:PARTNERS]):
            given, taken = self._best_exchange(heavy, light, load - other_load)
            shift = given[0] - taken[0]
            if max(load - shift, other_load + shift) < load * (1 - LEAST_GAIN):
                self._move(given, heavy, light)
                self._move(taken, light, heavy)
                del self._ascending[-1], self._ascending[place]
                insort(self._ascending, (load - shift, heavy))
                insort(self._ascending, (other_load + shift, light))
                return True
        return False

    def _best_exchange(self, heavy: int, light: int, gap: float) -> tuple[Item, Item]:
        """What to give for what, so that the difference of the two comes closest to half the gap between the parts."""
        candidates, pairs = self._parts[light], []
        for given in self._parts[heavy][1:]:
            place = bisect_left(candidates, (given[0] - gap / 2, -1))
            pairs += [(given, taken) for taken in candidates[max(place - 1, 0) : place + 1]]
        return min(pairs, key=lambda pair: abs(pair[0][0] - pair[1][0] - gap / 2))

    def _move(self, item: Item, source: int, target: int) -> None:
        if item != NOTHING:
            del self._parts[source][bisect_left(self._parts[source], item)]
            insort(self._parts[target], item)
