"""What every parameter of a worker is to be, as a checksum that follows from the plan."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from mppo.megatron import platform
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transfer_plan import Holding, Layout, Piece
from mppo.weights.transports.point_to_point import PointToPoint

WORD = 0xFFFFFFFF
TILE, TILES = 8192, 128
"""Words of a tile, and tiles that are looked at together."""
SEED = 0x243F6A88
PLACES = ((0x27D4EB2D, SEED, 15), (0x165667B1, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & WORD, 13))
"""How a place is mixed, for each half of the hash: factor, seed, bits of the turn."""
WAVE_BYTES = 256 << 20
"""Parameters that a rank puts together at a time."""


def checksum(tensor: Tensor) -> str:
    """As SGLang's `/weights_checker` has it (`tensor_hash`, srt/managers/mm_utils.py): of tensors on the host the first
    8 bytes of the SHA-256 of their bytes, of those on a GPU `word_hash`."""
    if tensor.is_cuda:
        return f"{word_hash(tensor):016x}"
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).hexdigest()[:16]


def word_hash(tensor: Tensor) -> int:
    """SGLang's hash of a tensor on a GPU (`gpu_tensor_hash`, kernels/ops/memory/gpu_tensor_hash.py), in 64 bits.

    Each 32-bit word is mixed with its place (Murmur3's finaliser), words are summed in tiles, and tiles once more. Here
    in int64, since torch has little arithmetic of uint32. Compared with the same in plain Python; not with the kernel,
    which needs a GPU.
    """
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = functional.pad(content, (0, -len(content) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), TILE * TILES):
        part = words[start : start + TILE * TILES].long() & WORD
        place = torch.arange(start, start + len(part), device=part.device) & WORD
        halves = []
        for factor, seed, turn in PLACES:
            mixed = _mix(part ^ ((place * factor + seed) & WORD) ^ _rotated(place, turn))
            sums = functional.pad(mixed, (0, -len(mixed) % TILE)).view(-1, TILE).sum(1) & WORD
            halves.append(_mix(sums ^ (4 * len(words) & WORD)).tolist())
        total += sum((high << 32) + low for high, low in zip(*halves, strict=True))
    return _split_mix(total) if len(words) else 0


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def _rotated(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & WORD


def _split_mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


class ExpectedChecksums:
    """Of the workers of one server, which are the same for each server of these sizes.

    A rank puts whole parameters of workers together, in turn, from the slices of those that hold them: point to point,
    in waves, so that it never holds more than one wave.
    """

    def __init__(self, target: Layout, ranks: int):
        self.target, self.ranks = target, ranks
        self.transport = PointToPoint()
        self.waves: list[Layout] = []

    def find(self, weights: LiveWeights) -> dict[str, str]:
        """`{"<tp rank>/<parameter>": checksum}` of those that this rank puts together. Collective."""
        self.waves = self.waves or list(_waves(self.target, self.ranks))
        found: dict[str, str] = {}
        for wave in self.waves:
            dtype = next(iter(wave.tensors.values())).dtype
            shapes = wave.holdings[weights.rank].shapes
            whole = {name: torch.zeros(shape, dtype=dtype, device=platform.device()) for name, shape in shapes.items()}
            self.transport.run(weights.plan_for(wave), weights, whole)
            found |= {name: checksum(tensor) for name, tensor in whole.items()}
        return found


def _waves(target: Layout, ranks: int) -> Iterator[Layout]:
    """The parameters of all workers of a server, dealt out to the ranks."""
    size = next(iter(target.tensors.values())).dtype.itemsize
    loads, dealt = [0] * ranks, [Holding({}, ()) for _ in range(ranks)]
    for parameter in _parameters(target):
        shape = next(iter(parameter.shapes.values()))
        rank, own = loads.index(min(loads)), prod(shape) * size
        if loads[rank] and loads[rank] + own > WAVE_BYTES:
            yield Layout(target.tensors, dict(enumerate(dealt)))
            loads, dealt, rank = [0] * ranks, [Holding({}, ()) for _ in range(ranks)], 0
        loads[rank] += own
        before = dealt[rank]
        dealt[rank] = Holding(before.shapes | parameter.shapes, before.pieces + parameter.pieces)
    yield Layout(target.tensors, dict(enumerate(dealt)))


def _parameters(target: Layout) -> Iterator[Holding]:
    """Each alone, under its worker's number and its name."""
    first = min(worker.server for worker in target.holdings)
    for worker, holding in target.holdings.items():
        if worker.server != first:
            continue
        pieces: dict[str, list[Piece]] = {name: [] for name in holding.shapes}
        for piece in holding.pieces:
            pieces[piece.own.name].append(piece)
        for name, shape in holding.shapes.items():
            key = f"{worker.tp_rank}/{name}"
            own = tuple(Piece(piece.hf, replace(piece.own, name=key)) for piece in pieces[name])
            yield Holding({key: shape}, own)
