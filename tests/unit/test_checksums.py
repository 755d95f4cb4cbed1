"""Checksums as SGLang has them, against the same in plain Python."""

import hashlib

import pytest
import torch

from mppo.weights.checksums import SEED, TILE, checksum, word_hash

pytestmark = pytest.mark.unit

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def turned(x: int, bits: int) -> int:
    return (x << bits | x >> (32 - bits)) & WORD


def in_plain_python(content: bytes) -> int:
    """Word by word, as the kernel's comments and constants say."""
    content += bytes(-len(content) % 4)
    words = [int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4)]
    seeds = SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & WORD
    total = 0
    for start in range(0, len(words), TILE):
        first = second = 0
        for place, word in enumerate(words[start : start + TILE], start):
            first += mix(word ^ ((place * 0x27D4EB2D + seeds[0]) & WORD ^ turned(place, 15)))
            second += mix(word ^ ((place * 0x165667B1 + seeds[1]) & WORD ^ turned(place, 13)))
        size = 4 * len(words) & WORD
        total += mix(first & WORD ^ size) << 32 | mix(second & WORD ^ size)
    total &= LONG
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 & LONG
    total = (total ^ total >> 27) * 0x94D049BB133111EB & LONG
    return total ^ total >> 31


@pytest.mark.parametrize("size", [1, 2, 3, 100, 2 * TILE - 1, 2 * TILE, 5 * TILE + 7])
def test_the_hash_of_words(size):
    tensor = torch.randn(size).to(torch.bfloat16)
    assert word_hash(tensor) == in_plain_python(tensor.view(torch.uint8).numpy().tobytes())


def test_the_hash_of_words_tells_places_apart():
    tensor = torch.arange(40.0)
    assert len({word_hash(tensor), word_hash(tensor.flip(0)), word_hash(tensor[:39]), word_hash(tensor + 1)}) == 4
    assert word_hash(tensor.view(8, 5).T.contiguous().T) == word_hash(tensor)


def test_on_the_host_it_is_sha_256():
    tensor = torch.randn(3, 5)[:, 1:4]
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert checksum(tensor) == hashlib.sha256(content).hexdigest()[:16]
