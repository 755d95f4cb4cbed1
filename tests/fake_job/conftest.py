"""Processes that see a GPU that is not there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import REPOSITORY, environment

TORCH = Path(torch.__path__[0])
Run = Callable[..., dict]


@pytest.fixture(scope="session")
def run_on_pretended_gpu(tmp_path_factory) -> Run:
    """`(module, *arguments)`: run `tests.fake_job.<module> FILE *arguments`, and return what it wrote, as JSON."""
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has CUDA's own hooks, where those of a pretended GPU would be")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the pretended GPU")
    folder = tmp_path_factory.mktemp("fake_job")
    library = folder / "pretended_gpu.so"
    _compile(Path(__file__).with_name("pretended_gpu.cpp"), library)
    preloaded = os.pathsep.join([str(TORCH / "lib/libc10.so"), str(library)])

    def run(module: str, *arguments: str) -> dict:
        file = folder / f"{module}.json"
        subprocess.run(
            [sys.executable, "-m", f"tests.fake_job.{module}", str(file), *arguments],
            env=environment() | {"LD_PRELOAD": preloaded, "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            check=True,
            timeout=300,
        )
        return json.loads(file.read_text())

    return run


def _compile(source: Path, library: Path) -> None:
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    links = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}"]
    command = ["g++", "-shared", "-fPIC", "-std=c++20", *includes, str(source), "-o", str(library), *links]
    subprocess.run(command, check=True, timeout=120)
