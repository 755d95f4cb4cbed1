"""The environment with SGLang, where there is one."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sglang_environment() -> Path:
    named = os.environ.get("MPPO_SGLANG_ENV")
    if not named:
        pytest.skip("MPPO_SGLANG_ENV names no environment with SGLang")
    return Path(named).resolve()
