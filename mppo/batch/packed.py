"""Trajectories packed end to end: the one coordinate system of mppo.

Index t of every per-token field is about predicting `tokens[t+1]`: the logits at t, the value of state t, the
mask, reward and advantage of the action taken there. The shift by one happens in `pack` and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.batch.trajectory import Trajectory


def _per_token(**kwargs):
    return field(metadata={"per_token": True}, **kwargs)


def _per_trajectory(**kwargs):
    return field(metadata={"per_trajectory": True}, **kwargs)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`; a copy from the host to a GPU goes through pinned memory and is not waited for."""
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class PackedBatch:
    """S trajectories in T positions. All per-token fields are cut alike (`select`)."""

    cu_seqlens: Tensor
    """`[S+1]` int32 on the host: boundaries of the trajectories."""
    indices: Tensor = _per_trajectory()
    """`[S]` long: place of each trajectory in the global batch; -1 for padding."""
    groups: Tensor = _per_trajectory()
    """`[S]` long: prompt group of each trajectory."""
    tokens: Tensor = _per_token()
    """`[T]` long."""
    labels: Tensor = _per_token()
    """`[T]` long: the next token of the trajectory; 0 at its last position, which is never an action."""
    positions: Tensor = _per_token()
    """`[T]` long: place within the trajectory."""
    mask: Tensor = _per_token()
    """`[T]` bool: actions, as the rollout has it; what is projected."""
    rollout_log_probs: Tensor = _per_token()
    """`[T]`: under the policy that generated."""
    rewards: Tensor = _per_token()
    """`[T]`: token-level rewards; the outcome stands at the last action."""
    old_log_probs: Tensor | None = _per_token(default=None)
    """`[T]`: the PPO anchor."""
    ref_log_probs: Tensor | None = _per_token(default=None)
    """`[T]`: the frozen reference."""
    values: Tensor | None = _per_token(default=None)
    """`[T]`: the critic before its update."""
    kept: Tensor | None = _per_token(default=None)
    """`[T]` bool: the actions that train, where some are rejected; None: all of them."""
    advantages: Tensor | None = _per_token(default=None)
    returns: Tensor | None = _per_token(default=None)
    rollout_is_weights: Tensor | None = _per_token(default=None)
    """`[T]`: importance weights of the rollout correction, where it has them."""
    sum_pi_squared: Tensor | None = _per_token(default=None)
    """`[T]`: sum over the vocabulary of the anchor's squared probabilities, where the estimator needs it."""
    ref_hidden: Tensor | None = _per_token(default=None)
    """`[T, H]`: last hidden states of the reference, on the last pipeline stage, for the exact KL in the loss."""
    old_hidden: Tensor | None = _per_token(default=None)
    """`[T, H]`: the same of the anchor, for the exact KL in the reward."""
    full_kl: Tensor | None = _per_token(default=None)
    """`[T]`: exact KL of the anchor to the reference, where the reward is penalised by it."""
    prepared: dict[str, Tensor] = _per_token(default_factory=dict)
    """`[T]` each: what the `prepare` of the policy loss returned."""
    token_weights: Tensor | None = _per_token(default=None)
    """`[T]`: what each token loss counts in the objective at hand (see `mppo.algorithm.aggregation`)."""
    origin: Tensor | None = _per_token(default=None)
    """`[T]` long: position in the batch that this one was selected from; -1 for padding."""
    count: int | None = None
    """Of a batch of actions: the tokens, prompts included, of the batch that they were taken from (`num_tokens`)."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory."""
        return self.cu_seqlens.diff().tolist()

    @property
    def loss_mask(self) -> Tensor:
        """`[T]` bool: positions whose losses count."""
        return self.mask if self.kept is None else self.kept

    @property
    def real(self) -> Tensor:
        """`[T]` bool: positions of trajectories, prompts included; padding is none."""
        real = (self.indices >= 0)[self.segments.ids]
        return real if self.origin is None else real & (self.origin >= 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of trajectories: what Megatron counts; padding, which a layout may add, is left out."""
        return int(self.real.sum()) if self.count is None else self.count

    @cached_property
    def segments(self) -> Segments:
        segments = Segments.from_cu_seqlens(self.cu_seqlens)  # on the host: no waiting for the device
        return replace(segments, ids=to_device(segments.ids, self.tokens.device))

    def with_fields(self, **values: Tensor) -> "PackedBatch":
        return replace(self, **values)

    def to(self, device: torch.device) -> "PackedBatch":
        """Move everything but the boundaries, which the host reads; see `to_device`."""
        return self._map(lambda _, x: to_device(x, device), lambda _, x: to_device(x, device))

    def _map(self, per_token: Callable[[str, Tensor], Tensor], per_trajectory: Callable[[str, Tensor], Tensor]):
        """This batch with every vector it has replaced by what the function of its kind makes of it."""
        mapped: dict[str, Any] = {}
        for f in fields(self):
            value, fn = getattr(self, f.name), per_token if "per_token" in f.metadata else per_trajectory
            if isinstance(value, dict):
                mapped[f.name] = {name: fn(name, x) for name, x in value.items()}
            elif f.metadata and value is not None:
                mapped[f.name] = fn(f.name, value)
        return replace(self, **mapped)

    def select(self, which: list[int]) -> "PackedBatch":
        """The trajectories at local places `which`, in that order, with `origin` pointing back here."""
        rows = torch.tensor(which, dtype=torch.long)
        starts = self.cu_seqlens[:-1].long()[rows]
        lengths = self.cu_seqlens.diff().long()[rows]
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        shift = torch.repeat_interleave(starts - cu_seqlens[:-1], lengths)
        origin = to_device(torch.arange(int(cu_seqlens[-1])) + shift, self.tokens.device)
        return replace(self._take(origin, rows), cu_seqlens=cu_seqlens.int(), origin=origin)

    def exchanged(
        self, lengths: list[int], tokens: Callable[[Tensor], Tensor], trajectories: Callable[[Tensor], Tensor]
    ) -> "PackedBatch":
        """A batch of trajectories of `lengths` tokens that takes the place of this one, and points to none (`origin`).

        `tokens` makes its `[T, ...]` of each field per token, `trajectories` its `[S]` of each per trajectory.
        """
        batch = replace(self, origin=None)._map(lambda _, x: tokens(x), lambda _, x: trajectories(x))
        return replace(batch, cu_seqlens=torch.tensor([0, *lengths], dtype=torch.long).cumsum(0).int())

    def actions(self) -> tuple[Tensor, "PackedBatch"]:
        """The rows `[A]` of this batch that are actions, and those rows as a batch of their own.

        Its trajectories are as long as they have actions; `origin` still points where this batch's does.
        """
        rows = self.mask.nonzero().squeeze(-1)
        counts = self.segments.lengths(self.mask).cpu()
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
        return rows, replace(self._take(rows, slice(None)), cu_seqlens=cu_seqlens, count=self.num_tokens)

    def _take(self, positions: Tensor, trajectories: Tensor | slice) -> "PackedBatch":
        return self._map(lambda _, x: x.index_select(0, positions), lambda _, x: x[trajectories])

    def pad_to_multiple(self, multiple: int) -> "PackedBatch":
        """Append one run of masked positions so that T is a positive multiple of `multiple`.

        Padding is no trajectory: its index is -1, its mask False, and it counts nowhere.
        """
        short = -len(self) % multiple if len(self) else multiple
        if not short:
            return self

        def pad(count: int) -> Callable[[str, Tensor], Tensor]:
            def appended(name: str, x: Tensor) -> Tensor:
                fill = -1 if name in ("indices", "groups", "origin") else 0
                return torch.cat([x, x.new_full((count, *x.shape[1:]), fill)])

            return appended

        padded = self._map(pad(short), pad(1))
        padded.positions[-short:] = torch.arange(short, device=self.tokens.device)
        return replace(padded, cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + short]))

    def context_slice(self, rank: int, size: int) -> "PackedBatch":
        """What context-parallel rank `rank` of `size` holds: two chunks of each trajectory, zigzag.

        Each trajectory is padded to a multiple of `2 * size` and cut into as many chunks; rank r has chunks r and
        `2 * size - 1 - r`, so that causal attention costs all ranks the same. Padding has no mask and origin -1.
        `token_weights` are those of whole trajectories: take the slice after they are set.
        """
        if size == 1:
            return self
        lengths = self.cu_seqlens.diff().long()
        chunk = -(-lengths // (2 * size))
        cu_seqlens = torch.cat([lengths.new_zeros(1), (2 * chunk).cumsum(0)])
        ids = torch.repeat_interleave(torch.arange(len(lengths)), 2 * chunk)
        offset = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[ids]
        is_back = offset >= chunk[ids]
        place = torch.where(is_back, (2 * size - 2 - rank) * chunk[ids] + offset, rank * chunk[ids] + offset)
        real = place < lengths[ids]
        taken = self.cu_seqlens[:-1].long()[ids] + torch.where(real, place, 0)
        sliced = self._take(taken.to(self.tokens.device), slice(None))
        origin = taken if self.origin is None else self.origin.cpu()[taken]
        cleared = {
            name: x for name in ("labels", "mask", "token_weights", "kept") if (x := getattr(sliced, name)) is not None
        }
        return replace(
            sliced,
            cu_seqlens=cu_seqlens.int(),
            positions=place,
            origin=torch.where(real, origin, -1),
            **{name: torch.where(real, x, torch.zeros_like(x)) for name, x in cleared.items()},
        )

    def gather_back(self, origins: list[Tensor], values: list[Tensor]) -> Tensor:
        """`[T, ...]`: put values of pieces of this batch back to where each position came from; 0 elsewhere."""
        dtype, shape = (values[0].dtype, values[0].shape[1:]) if values else (torch.float32, ())
        result = torch.zeros(len(self), *shape, dtype=dtype, device=self.tokens.device)
        for origin, value in zip(origins, values, strict=True):
            real = origin >= 0
            result[origin[real].to(result.device)] = value[real].to(result)
        return result


def pack(trajectories: list[Trajectory]) -> PackedBatch:
    """Lay trajectories end to end and shift their fields from token to state coordinates, once and for all."""

    def states(per_token: list[Tensor], dtype: torch.dtype) -> Tensor:
        """`[L]` each, about token i -> `[T]`, about predicting token t+1."""
        shifted = [torch.cat([x[1:], x.new_zeros(min(len(x), 1))]) for x in per_token]
        return torch.cat(shifted).to(dtype) if shifted else torch.zeros(0, dtype=dtype)

    lengths = torch.tensor([0] + [len(t) for t in trajectories], dtype=torch.long)
    return PackedBatch(
        cu_seqlens=lengths.cumsum(0).int(),
        indices=torch.tensor([t.index for t in trajectories], dtype=torch.long),
        groups=torch.tensor([t.group for t in trajectories], dtype=torch.long),
        tokens=torch.cat([t.tokens for t in trajectories]) if trajectories else torch.zeros(0, dtype=torch.long),
        labels=states([t.tokens for t in trajectories], torch.long),
        positions=torch.cat([torch.arange(n) for n in lengths[1:]] or [torch.zeros(0, dtype=torch.long)]),
        mask=states([t.action_mask for t in trajectories], torch.bool),
        rollout_log_probs=states([t.rollout_log_probs for t in trajectories], torch.float32),
        rewards=states([_token_rewards(t) for t in trajectories], torch.float32),
    )


def unpack(batch: PackedBatch, values: Tensor) -> list[Tensor]:
    """`[T]` in state coordinates -> one `[L]` vector per trajectory in token coordinates (entry 0 is 0)."""
    pieces = values.split(batch.lengths)
    return [torch.cat([piece.new_zeros(min(len(piece), 1)), piece[:-1]]) for piece in pieces]


def _token_rewards(trajectory: Trajectory) -> Tensor:
    dense = trajectory.token_rewards
    rewards = torch.zeros(len(trajectory)) if dense is None else dense.clone()
    actions = trajectory.action_mask.nonzero()
    if len(actions):
        rewards[actions[-1]] += trajectory.reward
    return rewards
