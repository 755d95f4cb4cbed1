"""Trajectories packed end to end: the one coordinate system of mppo.

Index t of every per-token vector is about predicting `token_ids[t+1]`: the logits at t, the value of state t, the
mask, reward and advantage of the action taken there. The shift by one happens in `pack` and nowhere else.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from mppo.algorithm.segments import Segments
from mppo.batch.trajectory import Judgement, Trajectory
from mppo.errors import DataError

PREPARED = "prepared"
"""Fields that the `prepare` step of a policy loss finds stand under `prepared/<name>`."""

CORE = ("token_ids", "labels", "positions", "mask")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`; a copy from the host to a GPU goes through pinned memory and is not waited for."""
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class PackedBatch:
    """S trajectories in T positions: a core that every pass reads, and named fields `[T, ...]` for who asks for them.

    All per-token vectors are cut alike (`select`). The names of fields are listed in this folder's README.
    """

    cu_seqlens: Tensor
    """`[S+1]` int32 on the host: boundaries of the trajectories."""
    indices: Tensor
    """`[S]` long: number of each trajectory in the batch of the step; -1 for padding."""
    token_ids: Tensor
    """`[T]` long."""
    labels: Tensor
    """`[T]` long: the next token of the trajectory; 0 at its last position, which is never an action."""
    positions: Tensor
    """`[T]` long: how many tokens of the trajectory come before."""
    mask: Tensor
    """`[T]` bool: actions, as the rollout has it; what is projected."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """`[T, ...]` each, by name."""
    origin: Tensor | None = None
    """`[T]` long: position in the batch that this one was selected from; -1 for padding."""
    selected_from: int | None = None
    """Of a batch of actions: the tokens, prompts included, of the batch that they were taken from."""

    @classmethod
    def of(cls, lengths: Sequence[int], indices: Sequence[int], token_ids: Tensor, mask: Tensor) -> "PackedBatch":
        """Whole trajectories of `lengths` tokens, laid end to end; labels and positions follow."""
        sizes = torch.tensor([0, *lengths], dtype=torch.long)
        cu_seqlens = sizes.cumsum(0)
        starts = torch.repeat_interleave(cu_seqlens[:-1], sizes[1:])
        labels = torch.cat([token_ids[1:], token_ids.new_zeros(min(len(token_ids), 1))])
        ends = cu_seqlens[1:][sizes[1:] > 0] - 1
        labels[ends] = 0
        return cls(
            cu_seqlens=cu_seqlens.int(),
            indices=torch.tensor(list(indices), dtype=torch.long),
            token_ids=token_ids,
            labels=labels,
            positions=torch.arange(len(token_ids)) - starts,
            mask=mask,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, name: str) -> Tensor:
        """The field `name`, `[T, ...]`. Raises DataError that lists the fields there are."""
        if name not in self.fields:
            raise DataError(f"the batch has no field {name!r}; it has {', '.join(sorted(self.fields)) or 'none'}")
        return self.fields[name]

    def get(self, name: str) -> Tensor | None:
        """The field `name`, or None where the batch has none."""
        return self.fields.get(name)

    @property
    def prepared(self) -> dict[str, Tensor]:
        """What the `prepare` step of the policy loss found, by its names."""
        prefix = PREPARED + "/"
        return {name.removeprefix(prefix): x for name, x in self.fields.items() if name.startswith(prefix)}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory."""
        return self.cu_seqlens.diff().tolist()

    @property
    def loss_mask(self) -> Tensor:
        """`[T]` bool: the actions that train, which is all of them unless the field `kept` says otherwise."""
        return self.fields.get("kept", self.mask)

    @property
    def real(self) -> Tensor:
        """`[T]` bool: positions of trajectories, prompts included; padding is none."""
        real = (self.indices >= 0)[self.segments.ids]
        return real if self.origin is None else real & (self.origin >= 0)

    @property
    def real_tokens(self) -> int:
        """Tokens of trajectories: what Megatron counts; padding, which a layout may add, is left out."""
        return int(self.real.sum()) if self.selected_from is None else self.selected_from

    @cached_property
    def segments(self) -> Segments:
        """Which trajectory each position belongs to."""
        segments = Segments.from_cu_seqlens(self.cu_seqlens)  # on the host: no waiting for the device
        return replace(segments, ids=to_device(segments.ids, self.token_ids.device))

    def with_fields(self, values: dict[str, Tensor | None] | None = None, /, **named: Tensor | None) -> "PackedBatch":
        """With these fields set; None takes a field away."""
        fields = {**self.fields, **(values or {}), **named}
        return replace(self, fields={name: x for name, x in fields.items() if x is not None})

    def only(self, names: Collection[str]) -> "PackedBatch":
        """Without the fields that are not named; a name stands for all below it too (`prepared`)."""
        kept = {name: x for name, x in self.fields.items() if name in names or name.partition("/")[0] in names}
        return replace(self, fields=kept)

    def to(self, device: torch.device) -> "PackedBatch":
        """Move everything but the boundaries, which the host reads; see `to_device`."""
        moved = self._map(lambda _, x: to_device(x, device))
        moved = replace(moved, indices=to_device(self.indices, device))
        vars(moved)["segments"] = replace(self.segments, ids=to_device(self.segments.ids, device))
        return moved

    def _map(self, of: Callable[[str, Tensor], Tensor]) -> "PackedBatch":
        """This batch with every per-token vector `x` called `name` replaced by `of(name, x)`."""
        return replace(
            self,
            token_ids=of("token_ids", self.token_ids),
            labels=of("labels", self.labels),
            positions=of("positions", self.positions),
            mask=of("mask", self.mask),
            origin=None if self.origin is None else of("origin", self.origin),
            fields={name: of(name, x) for name, x in self.fields.items()},
        )

    def select(self, which: list[int]) -> "PackedBatch":
        """The trajectories number `which` of this batch, in that order, with `origin` pointing back here."""
        rows = torch.tensor(which, dtype=torch.long)
        starts = self.cu_seqlens[:-1].long()[rows]
        lengths = self.cu_seqlens.diff().long()[rows]
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        shift = torch.repeat_interleave(starts - cu_seqlens[:-1], lengths)
        origin = to_device(torch.arange(int(cu_seqlens[-1])) + shift, self.token_ids.device)
        return replace(self._take(origin), indices=self.indices[rows], cu_seqlens=cu_seqlens.int(), origin=origin)

    def exchanged(
        self, lengths: Sequence[int], indices: Sequence[int], swap: Callable[[Tensor], Tensor]
    ) -> "PackedBatch":
        """The batch of whole trajectories `indices`, of `lengths` tokens, that takes the place of this one.

        `swap` makes its `[T, ...]` of each of this batch's vectors; it is called for the same ones on every rank.
        """
        batch = PackedBatch.of(lengths, indices, swap(self.token_ids), swap(self.mask))
        return batch.with_fields({name: swap(self.fields[name]) for name in sorted(self.fields)})

    def actions(self) -> tuple[Tensor, "PackedBatch"]:
        """The rows `[A]` of this batch that are actions, and those rows as a batch of their own.

        Its trajectories are as long as they have actions; `origin` still points where this batch's does.
        """
        rows = self.mask.nonzero().squeeze(-1)
        counts = self.segments.lengths(self.mask).cpu()
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
        return rows, replace(self._take(rows), cu_seqlens=cu_seqlens, selected_from=self.real_tokens)

    def _take(self, positions: Tensor) -> "PackedBatch":
        return self._map(lambda _, x: x.index_select(0, positions))

    def pad_to_multiple(self, multiple: int) -> "PackedBatch":
        """Append one run of masked positions so that T is a positive multiple of `multiple`.

        Padding is no trajectory: its index is -1, its mask False, and it counts nowhere.
        """
        short = -len(self) % multiple if len(self) else multiple
        if not short:
            return self

        def pad(name: str, x: Tensor) -> Tensor:
            return torch.cat([x, x.new_full((short, *x.shape[1:]), -1 if name == "origin" else 0)])

        padded = self._map(pad)
        padded.positions[-short:] = torch.arange(short, device=self.token_ids.device)
        return replace(
            padded,
            indices=torch.cat([self.indices, self.indices.new_full((1,), -1)]),
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + short]),
        )

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
        position = torch.where(is_back, (2 * size - 2 - rank) * chunk[ids] + offset, rank * chunk[ids] + offset)
        real = position < lengths[ids]
        taken = self.cu_seqlens[:-1].long()[ids] + torch.where(real, position, 0)
        sliced = self._take(taken.to(self.token_ids.device))
        origin = taken if self.origin is None else self.origin.cpu()[taken]

        def cleared(x: Tensor) -> Tensor:
            return torch.where(real, x, torch.zeros_like(x))

        masks = {name: cleared(sliced.fields[name]) for name in ("token_weights", "kept") if name in sliced.fields}
        return replace(
            sliced,
            cu_seqlens=cu_seqlens.int(),
            positions=position,
            origin=torch.where(real, origin, -1),
            labels=cleared(sliced.labels),
            mask=cleared(sliced.mask),
            fields=sliced.fields | masks,
        )

    def gather_back(self, origins: list[Tensor], values: list[Tensor]) -> Tensor:
        """`[T, ...]`: put values of pieces of this batch back to where each position came from; 0 elsewhere."""
        dtype, shape = (values[0].dtype, values[0].shape[1:]) if values else (torch.float32, ())
        result = torch.zeros(len(self), *shape, dtype=dtype, device=self.token_ids.device)
        for origin, value in zip(origins, values, strict=True):
            real = origin >= 0
            result[origin[real].to(result.device)] = value[real].to(result)
        return result


def pack(
    trajectories: Sequence[Trajectory],
    judgements: Sequence[Judgement] | None = None,
    indices: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay trajectories end to end and shift their vectors from token to state coordinates, once and for all.

    Fields: `rollout_log_probs`, and where there are judgements `rewards`. `indices` are the numbers of the
    trajectories in the batch of the step, by default 0, 1, 2, ...
    """

    def states(per_token: list[Tensor], dtype: torch.dtype) -> Tensor:
        """`[L]` each, about token i -> `[T]`, about predicting token t+1."""
        shifted = [torch.cat([x[1:], x.new_zeros(min(len(x), 1))]) for x in per_token]
        return torch.cat(shifted).to(dtype) if shifted else torch.zeros(0, dtype=dtype)

    batch = PackedBatch.of(
        lengths=[len(t) for t in trajectories],
        indices=range(len(trajectories)) if indices is None else indices,
        token_ids=torch.cat([torch.zeros(0, dtype=torch.long), *(t.token_ids for t in trajectories)]),
        mask=states([t.action_mask for t in trajectories], torch.bool),
    )
    fields = {"rollout_log_probs": states([t.rollout_log_probs for t in trajectories], torch.float32)}
    if judgements is not None:
        rewards = [_token_rewards(t, j) for t, j in zip(trajectories, judgements, strict=True)]
        fields["rewards"] = states(rewards, torch.float32)
    return batch.with_fields(**fields)


def unpack(batch: PackedBatch, values: Tensor) -> list[Tensor]:
    """`[T]` in state coordinates -> one `[L]` vector per trajectory in token coordinates (entry 0 is 0)."""
    pieces = values.split(batch.lengths)
    return [torch.cat([piece.new_zeros(min(len(piece), 1)), piece[:-1]]) for piece in pieces]


def _token_rewards(trajectory: Trajectory, judgement: Judgement) -> Tensor:
    """`[L]`: token rewards, and the outcome at the last action."""
    given = judgement.token_rewards
    rewards = torch.zeros(len(trajectory)) if given is None else given.clone()
    actions = trajectory.action_mask.nonzero()
    if len(actions):
        rewards[actions[-1]] += judgement.score or 0.0
    return rewards
