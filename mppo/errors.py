"""The errors mppo raises for bad input. Each message names the field, file or sample, and the fix."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class MppoError(Exception):
    """Base of every error that is the user's to fix; the command line prints it without a traceback."""

    on_every_rank = False
    """Whether all ranks raise it, so that one of them says enough."""
    on_every_rank_of_machine = False
    """Whether all ranks of a machine do, but perhaps not those of others: a file may be missing on one."""

    def told(self) -> str:
        """Its kind and what it says, with its notes on lines of their own."""
        return "\n".join([f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])])


class ConfigError(MppoError, ValueError):
    """A configuration field is unknown, contradictory, out of range, or would be ignored."""


class ModelError(MppoError, ValueError):
    """A model folder is missing, incomplete, or of an architecture mppo does not know."""


class DataError(MppoError, ValueError):
    """A prompt file, a prompt or a trajectory cannot be used."""


class TrainingError(MppoError, ArithmeticError):
    """The loss or the gradient of an optimizer step is not finite; the step was not made."""


class CheckpointError(MppoError, OSError):
    """A checkpoint cannot be written or read."""


class RewardError(MppoError, ValueError):
    """A reward function raised, or returned something that is not a finite number."""


class EngineError(MppoError, RuntimeError):
    """A rollout engine cannot answer: it has no weights, an update failed, or it does not answer in time."""


@contextmanager
def alike_on_every_rank() -> Iterator[None]:
    """What is inside follows from what every rank knows: an MppoError of one is an error of all."""
    try:
        yield
    except MppoError as error:
        error.on_every_rank = True
        raise


@contextmanager
def alike_on_machine() -> Iterator[None]:
    """What is inside follows from what every rank knows and from the files of a machine."""
    try:
        yield
    except MppoError as error:
        error.on_every_rank_of_machine = True
        raise


class RankError(MppoError, RuntimeError):
    """A rank failed with an error that is not mppo's."""

    @classmethod
    def of(cls, error: Exception, rank: int) -> "RankError":
        """Of that rank, with the traceback, for all ranks to raise."""
        return cls(f"rank {rank} failed:\n" + "".join(traceback.format_exception(error)))
