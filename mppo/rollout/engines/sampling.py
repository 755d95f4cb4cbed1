"""Drawing one token per row: temperature, top-k, top-p, by inverse transform of given uniform numbers."""

import numpy as np
import torch
from torch import Tensor

from mppo.rollout.engines.contract import SamplingParams


def uniforms(seeds: list[tuple[int, ...]], count: int) -> Tensor:
    """`[B, count]` float64 in [0, 1): a stream of its own for every seed, whatever the batch."""
    return torch.from_numpy(np.stack([np.random.default_rng(seed).random(count) for seed in seeds]))


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """logits `[B, V]`, uniform `[B]` -> tokens `[B]` and their log-probs `[B]` (float32).

    The log-prob is that of the distribution that the token is drawn from: `softmax(logits / temperature)`, where top-k
    or top-p leave tokens out over those that are kept; for greedy decoding that of temperature 1.
    """
    log_probs = torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1)
    kept = None
    if params.temperature == 0:
        tokens = log_probs.argmax(-1)
    else:
        probs, order = log_probs.double().exp().sort(-1, descending=True)
        if params.top_k:
            probs[:, params.top_k :] = 0.0
        # keep the smallest set of likeliest tokens whose mass reaches top_p: those before which it is not reached
        probs = torch.where(probs.cumsum(-1) - probs < params.top_p, probs, 0.0)
        cumulative = probs.cumsum(-1)
        threshold = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
        place = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.size(-1) - 1)
        tokens = order.gather(1, place).squeeze(1)
        kept = cumulative[:, -1] if params.leaves_tokens_out else None
    chosen = log_probs.gather(1, tokens[:, None]).squeeze(1)
    return tokens, chosen if kept is None else chosen - kept.log().float()
