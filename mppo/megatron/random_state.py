"""The random generators of a rank, as a part of a checkpoint."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mppo.megatron.topology import Topology


class RandomState:
    """Of torch on the host and on the device. Another layout has other ranks, and starts its generators anew."""

    def __init__(self, topology: Topology):
        self.layout = [topology.tp, topology.cp, topology.pp, topology.dp, topology.ep]

    def state_dict(self) -> dict[str, Any]:
        return {"layout": self.layout, "host": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) != dist.get_world_size():
            return
        mine = states[dist.get_rank()]
        if mine["layout"] == self.layout:
            torch.set_rng_state(mine["host"])
            torch.cuda.set_rng_state(mine["device"])
