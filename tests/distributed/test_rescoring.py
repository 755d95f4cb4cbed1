"""What the trainer would give to tokens if something were otherwise is the same in every layout."""

import pytest
import torch

from tests.distributed.ranks import call_on_ranks
from tests.distributed.rescoring_worker import CHANGES, LAYOUTS, PARAMETERS, scores

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def alone():
    return call_on_ranks(scores, 1, LAYOUTS["alone"][1])[0]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "alone"])
def test_scores_do_not_depend_on_the_layout(alone, layout):
    processes, overrides = LAYOUTS[layout]
    for of_rank in call_on_ranks(scores, processes, overrides):
        assert of_rank.keys() == alone.keys()
        for name, expected in alone.items():
            if (layout, name) == ("tp2", "padding"):
                continue  # Megatron pads a vocabulary to 128 rows for each rank
            tolerance = 2e-2 if name == "bfloat16 head" else 2e-5
            for x, y in zip(of_rank[name], expected, strict=True):
                assert torch.allclose(x, y, atol=tolerance), (layout, name)


def test_a_change_changes_and_is_undone(alone):
    for name in CHANGES:
        same = all(torch.equal(x, y) for x, y in zip(alone[name], alone["as it is"], strict=True))
        assert same == (name in ("as it is", "again as it is")), name


def test_likelihoods_are_those_of_the_scores(alone):
    """A token alone among those that are at least as likely has the mass of its own probability."""
    for mass, rank, top in zip(alone["mass"], alone["rank"], alone["top"], strict=True):
        assert bool((rank[1:] >= 1).all()) and bool((rank[1:] <= 70).all()) and bool((mass[1:] <= 1).all())
        few = rank[1:] <= 9
        assert bool((mass[1:][few] <= top[1:][few] + 1e-5).all()) and bool(
            (mass[1:][~few] >= top[1:][~few] - 1e-5).all()
        )


def test_parameters_are_whole(alone):
    assert [tuple(alone[name][0].shape) for name in PARAMETERS] == [(96, 64), (64, 64)]
    assert bool((alone["1/lm_head.weight"][0][6:] == 0).all()), "rows of padding"
