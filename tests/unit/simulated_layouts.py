"""Layouts without process groups, and how vectors travel between their ranks, which are threads."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from mppo.check_loss.simulated_ranks import Exchange
from mppo.megatron.topology import Sizes, Topology
from mppo.trainer.redistribution import Links


def world_of(tp: int, cp: int, pp: int, dp: int) -> list[Topology]:
    """Every rank's own view; Megatron counts tensor, context, data, pipeline."""
    sizes = Sizes(tp=tp, pp=pp, vpp=None, cp=cp, dp=dp, ep=1, etp=1, sequence_parallel=False)
    return [
        Topology(
            **vars(sizes),
            rank=rank,
            tp_rank=rank % tp,
            cp_rank=rank // tp % cp,
            dp_rank=rank // (tp * cp) % dp,
            pp_rank=rank // (tp * cp * dp),
            ep_rank=0,
            etp_rank=0,
        )
        for rank in range(tp * cp * dp * pp)
    ]


def worlds() -> st.SearchStrategy[list[Topology]]:
    return st.builds(world_of, *[st.integers(1, 2)] * 3, st.integers(1, 3))


def simulated_links(here: Topology, world: list[Topology], exchange: Exchange) -> Links:
    """What `Links.of` does between processes. Asserts that each rank was told the truth about what comes to it."""
    replicas = [there.rank for there in world if there.replica_rank == here.replica_rank]
    replica = [there.rank for there in world if there.dp_rank == here.dp_rank]

    def joined(pieces: list[Tensor], told: list[int]) -> Tensor:
        assert [len(piece) for piece in pieces] == told
        return torch.cat(pieces)

    def swap(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        of_ranks, sizes = gathered(x, exchange), gathered(torch.tensor(sent), exchange)
        pieces = [of_ranks[rank].split(sizes[rank].tolist())[here.dp_rank] for rank in replicas]
        return joined(pieces, received)

    def share(x: Tensor, sizes: list[int]) -> Tensor:
        of_ranks = gathered(x, exchange)
        return joined([of_ranks[rank] for rank in replica], sizes)

    return Links(swap, share)


def gathered(x: Tensor, exchange: Exchange) -> list[Tensor]:
    """Of every rank of the world."""
    sizes = exchange.gather(torch.tensor([len(x)]))
    return list(exchange.gather(x).split(sizes.tolist()))


def in_world(world: list[Topology], run: Callable[[Topology, Links], object]) -> Callable[[Topology, Exchange], object]:
    """`run` for `on_simulated_ranks`."""
    return lambda here, exchange: run(here, simulated_links(here, world, exchange))
