"""What one rank holds of a role, put down and taken up again without asking another rank.

It is for the moment in which ranks cannot work together any more; `role_checkpoint` is for all others, in any layout.
"""

from pathlib import Path

import torch
from megatron.core.utils import unwrap_model

from mppo.megatron.master_weights import MOMENTS, WEIGHT, master_weights
from mppo.megatron.optimizer import Optimizer


def rescue_role(chunks: list[torch.nn.Module], optimizer: Optimizer, file: Path) -> None:
    """Parameters, buffers and this rank's pieces of fp32 weights and moments; waits for an update to come to its end.

    Raises TimeoutError when that does not come.
    """
    with optimizer.at_rest():
        names = (WEIGHT, *MOMENTS) if optimizer.steps else (WEIGHT,)
        pieces = [master.piece for master in master_weights(chunks, optimizer.megatron)]
        state = {
            "steps": optimizer.steps,
            "tensors": [tensor.detach().cpu() for tensor in _tensors(chunks)],
            "pieces": [
                None if piece is None else {name: piece.named(name).cpu() for name in names} for piece in pieces
            ],
        }
        torch.save(state, file)


@torch.no_grad()
def take_up_role(chunks: list[torch.nn.Module], optimizer: Optimizer, file: Path) -> None:
    """The layout and the optimizer must be those under which it was put down."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    for tensor, saved in zip(_tensors(chunks), state["tensors"], strict=True):
        tensor.copy_(saved)
    for master, saved in zip(master_weights(chunks, optimizer.megatron), state["pieces"], strict=True):
        if master.piece is not None:
            moments = {name: saved[name] for name in MOMENTS if name in saved}
            master.piece.take(saved[WEIGHT], moments)
    optimizer.set_steps(state["steps"])


def _tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers, in an order that is always the same."""
    return [tensor for chunk in unwrap_model(chunks) for tensor in (*chunk.parameters(), *chunk.buffers())]
