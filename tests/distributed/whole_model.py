"""The whole model on every rank, by a plan."""

import torch
from torch import Tensor

from mppo.weights.live_weights import LiveWeights
from mppo.weights.transfer_plan import whole_tensors
from mppo.weights.transports.point_to_point import PointToPoint


def whole_copy(weights: LiveWeights, bucket_bytes: int = 1 << 20) -> dict[str, Tensor]:
    """Every Hugging Face tensor, under its name. Collective."""
    tensors = weights.layout.tensors
    target = whole_tensors(tensors, {rank: list(tensors) for rank in weights.layout.holdings})
    whole = {name: torch.full(tensor.shape, torch.nan, dtype=tensor.dtype) for name, tensor in tensors.items()}
    PointToPoint(bucket_bytes).run(weights.plan_for(target), weights, whole)
    return whole
