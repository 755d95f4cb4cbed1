"""What differs between the configuration of a checkpoint and that of the run that goes on from it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from mppo.config import Config

FREE = {
    "parallel.*": "a checkpoint can be loaded under any layout",
    "critic.parallel.*": "a checkpoint can be loaded under any layout",
    "model.make_vocab_size_divisible_by": "padding of the vocabulary follows the layout and is not trained",
    "model.recompute.*": "recomputation gives the same gradients",
    "critic.recompute*": "recomputation gives the same gradients",
    "*.use_dynamic_bsz": "how a mini-batch is cut into micro-batches leaves its gradient as it is",
    "*_per_gpu": "how a mini-batch is cut into micro-batches leaves its gradient as it is",
    "*.optim.use_distributed_optimizer": "where optimizer state lies changes no update",
    "*.optim.overlap_*": "when ranks communicate changes no update",
    "*.placement": "where a role rests while it is not used changes no update",
    "*.state_placement": "where optimizer state rests changes no update",
    "rollout.batch_size": "how many sequences are generated at a time",
    "reward.workers": "how many answers are judged at a time",
    "reward.timeout_s": "how long to wait",
    "reward.max_failure_rate": "when to give up",
    "rollout.timeout_s": "how long to wait",
    "data.val.*": "validation trains nothing",
    "actor.calculate_entropy": "is reported only",
    "strict": "is about what is refused at the start",
    "trainer.total_training_steps": "how far to train is decided anew by each run",
    "trainer.out_dir": "the folder may have been moved",
    "trainer.resume*": "is about how to start",
    "trainer.save_freq": "is about what is written",
    "trainer.save_hf_freq": "is about what is written",
    "trainer.save_hf": "is about what is written",
    "trainer.keep_checkpoints": "is about what is written",
    "trainer.samples_per_step": "is about what is written",
    "trainer.on_non_finite": "is about when to give up",
    "trainer.max_skipped_steps": "is about when to give up",
    "rollout.val_kwargs.*": "validation trains nothing",
    "trainer.test_freq": "validation trains nothing",
    "trainer.val_before_train": "validation trains nothing",
}
"""Patterns of fields that may differ without anybody being asked, and why."""

UNSET = "unset"


@dataclass(frozen=True)
class Change:
    """A field that was saved with one value and now has another; `unset` where it is not there at all."""

    path: str
    saved: Any
    now: Any

    @property
    def is_free(self) -> bool:
        """Whether the run goes on as it would have, in all that counts."""
        return any(fnmatchcase(self.path, pattern) for pattern in FREE)

    def __str__(self) -> str:
        return f"{self.path}: {self.saved} -> {self.now}"


def config_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """All fields that differ, by path, in order.

    A field that another version of mppo had not yet counts as saved with its default.
    """
    defaults = dict(_fields(asdict(Config())))
    before, after = dict(_fields(saved)), dict(_fields(now))
    found = []
    for path in sorted(before.keys() | after.keys()):
        change = Change(path, before.get(path, defaults.get(path, UNSET)), after.get(path, UNSET))
        if _plain(change.saved) != _plain(change.now):
            found.append(change)
    return found


def _fields(values: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """`{"actor": {"optim": {"lr": 1}}}` -> `("actor.optim.lr", 1)`; an empty dict has no fields."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
