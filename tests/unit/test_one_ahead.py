"""The next item is made when it is asked to be, once, and none is lost."""

import pytest

from mppo.trainer.one_ahead import OneAhead

pytestmark = pytest.mark.unit


def made(log: list[int], count: int):
    for number in range(count):
        log.append(number)
        yield number


def test_an_item_is_made_ahead_when_it_is_fetched():
    log: list[int] = []
    items, seen = OneAhead(made(log, 3)), []
    for item in items:
        seen.append((item, list(log)))
        items.fetch()
        items.fetch()
        assert log == list(range(min(item + 2, 3)))
    assert seen == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]


def test_without_fetching_each_is_made_when_its_turn_comes():
    log: list[int] = []
    assert [(item, len(log)) for item in OneAhead(made(log, 3))] == [(0, 1), (1, 2), (2, 3)]
    assert list(OneAhead(made(log, 0))) == []
