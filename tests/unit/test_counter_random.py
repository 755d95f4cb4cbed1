import pytest
import torch

from mppo.algorithm.counter_random import uniform

pytestmark = pytest.mark.unit

COUNT = 200_000
PLACES = torch.arange(COUNT)


def test_it_is_splitmix64():
    """The first words of the published generator for the state 1234567, whose stream starts from the state itself."""

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert mix((1234567 + 0x9E3779B97F4A7C15) % 2**64) == 6457827717110365317
    for seed in (0, 7, 2**60 - 1):
        words = [mix((mix(seed) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in (0, 1, 5, 10**9)]
        assert uniform(seed, torch.tensor([0, 1, 5, 10**9])).tolist() == [(word >> 11) / 2**53 for word in words]


@pytest.mark.parametrize("seed", [0, 1, 2**60 - 1])
def test_numbers_are_uniform(seed):
    """Kolmogorov and Smirnov: the largest distance of the distribution from the straight line is below 2 / sqrt(n)."""
    drawn = uniform(seed, PLACES).sort().values
    assert drawn[0] >= 0 and drawn[-1] < 1
    assert (drawn - (PLACES + 0.5) / COUNT).abs().max() < 2 / COUNT**0.5


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_neighbours_are_not_correlated(lag):
    drawn = uniform(3, PLACES) - 0.5
    assert abs((drawn[lag:] * drawn[:-lag]).mean() * 12) < 5 / COUNT**0.5


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (5, 5 + 2**32)])
def test_streams_of_neighbouring_seeds_are_not_correlated(one, other):
    product = (uniform(one, PLACES) - 0.5) * (uniform(other, PLACES) - 0.5)
    assert abs(product.mean() * 12) < 5 / COUNT**0.5


def test_a_place_draws_the_same_number_in_whatever_order_and_company():
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    whole = uniform(9, PLACES[:1000])
    assert torch.equal(uniform(9, order), whole[order])
    assert torch.equal(uniform(9, order[:10]), whole[order[:10]])
