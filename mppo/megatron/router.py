"""Which experts a token goes to: Megatron's router with a gate and a load-balancing loss of our own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mppo.megatron import platform


class Router(TopKRouter):
    """Megatron-core's own differ by version in what is overridden here.

    The gate of 0.16 does not run without Transformer Engine. The load-balancing loss of 0.16 counts only the positions
    of this rank, so sequence and context parallelism would make it smaller; and it has no answer for a micro-batch
    that is all padding.
    """

    balance_loss: Tensor | float = 0.0
    """What this rank added since it was last asked, see `take_balance_loss`."""

    def gating(self, input: Tensor) -> Tensor:
        """hidden `[T, 1, H]` -> logits `[T, 1, E]` in float32: near ties should not be decided by rounding."""
        return F.linear(input.float(), self.weight.float())

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Add `coeff * E * sum_e f_e P_e` of the micro-batch (Switch Transformer, arXiv:2101.03961, eq. 4 to 6), times
        its number of tokens, to what the backward pass starts from; returns `probs` unchanged.

        f_e is the share of the choices that fell on expert e, P_e the mean of its scores `[T, E]`. Both are of all
        ranks that hold a part of the micro-batch, and each rank adds its part of the sum over tokens. Padding is in
        neither: its scores and choices are zero. Since Megatron divides gradients by the number of tokens of the
        mini-batch, what is left is the mean over micro-batches, weighted by their tokens.
        """
        coeff = self.get_aux_loss_coeff("aux_loss")
        if coeff == 0:
            return probs
        chosen = routing_map.sum(0, dtype=torch.float32)
        dist.all_reduce(chosen, group=self.tp_cp_group)
        shares = chosen / chosen.sum().clamp(min=1)
        loss = coeff * len(shares) * (shares * scores_for_aux_loss.sum(0)).sum()
        self.balance_loss = self.balance_loss + loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, loss)


def take_balance_loss(chunks: list[torch.nn.Module]) -> Tensor:
    """The load-balancing loss, coefficient included, of this rank's layers and tokens since it was last asked; 0-dim.

    Summed over the world and divided by the tokens of the mini-batch that went through the schedule, it is the mean
    over its micro-batches, weighted by their tokens, summed over layers.
    """
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    total = torch.zeros((), dtype=torch.double, device=platform.device())
    for router in routers:
        total += router.balance_loss
        router.balance_loss = 0.0
    return total
