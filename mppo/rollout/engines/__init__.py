"""Rollout engines: the contract that all of them keep, and the embedded one."""

from mppo.rollout.engines import local  # noqa: F401  (registers)
from mppo.rollout.engines.contract import ENGINES
from mppo.rollout.engines.sglang import launching  # noqa: F401  (registers)

__all__ = ["ENGINES"]
