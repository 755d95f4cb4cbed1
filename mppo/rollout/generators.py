"""Prompt generators by name; those that come with mppo stand in `mppo.rollout.tasks`."""

from collections.abc import Callable
from typing import Any

from mppo.registry import Registry

GENERATORS: Registry[Callable[..., list[dict[str, Any]]]] = Registry("prompt generator")
"""A generator returns rows, `{"prompt": ..., "ground_truth": ...}`; further fields are for the reward function."""
