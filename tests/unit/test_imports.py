"""A room imports from itself and from rooms below it; `algorithm` and `batch` need no megatron-core."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mppo

pytestmark = pytest.mark.unit

PACKAGE = Path(mppo.__file__).parent
ROOMS = [
    "cli",
    "mismatch",
    "planning",
    "trainer",
    "rollout",
    "weights",
    "megatron",
    "check_loss",
    "batch",
    "algorithm",
    "ground",
]
"""From the top; `ground` is what everybody may import."""
GROUND = {"mppo", "registry", "config", "errors"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """`mppo.batch.batch_plan` -> `batch`."""
    name = [*module.split("."), "mppo"][1]
    return "ground" if name in GROUND else "cli" if name == "__main__" else name


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str) -> list[str]:
    """Every module that the source imports, at any depth of the code; relative ones are resolved in `package`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"mppo.{alias.name}" for alias in node.names] if module == "mppo" else [module]
    return found


def imported_by(file: Path) -> list[str]:
    return imports(file.read_text(), module_of(file if file.name == "__init__.py" else file.parent / "__init__.py"))


def test_all_kinds_of_imports_are_seen():
    source = (
        "import torch.nn\nfrom mppo import batch\ndef f():\n    from . import kl\n    from ..batch.batch_plan import x"
    )
    seen = ["torch.nn", "mppo.batch", "mppo.algorithm", "mppo.batch.batch_plan"]
    assert imports(source, "mppo.algorithm") == seen


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_of(file))
def test_a_file_imports_from_its_own_room_and_below(file):
    here = room_of(module_of(file))
    above = ROOMS[: ROOMS.index(here)]
    assert [m for m in imported_by(file) if m.split(".")[0] == "mppo" and room_of(m) in above] == []


def test_no_circle_of_imports():
    """Not inside a room either; what is imported for type checkers only counts too."""
    modules = {module_of(file): file for file in FILES}
    edges = {
        module: {target for target in imported_names(file) if target in modules and target != module}
        for module, file in modules.items()
        if file.name != "__init__.py"
    }
    while True:  # take away what imports nothing that is left; what stays is on a circle or leads to one
        leaves = {module for module, targets in edges.items() if not targets & edges.keys()}
        if not leaves:
            break
        edges = {module: targets for module, targets in edges.items() if module not in leaves}
    assert sorted(edges) == []


def imported_names(file: Path) -> set[str]:
    """The modules that a file imports from, `from a.b import c` standing for `a.b` and for `a.b.c`."""
    found = set(imported_by(file))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_file_name_occurs_twice():
    """`__init__` aside: whoever searches for a file by its name finds one."""
    names = [file.name for file in FILES if file.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} == set()


@pytest.mark.parametrize("file", (PACKAGE / "algorithm").rglob("*.py"), ids=lambda file: module_of(file))
def test_the_algorithm_imports_torch_and_the_registry_only(file):
    others = [m for m in imported_by(file) if m.split(".")[0] not in {"torch", *sys.stdlib_module_names}]
    allowed = ("mppo.algorithm", "mppo.registry", "mppo.errors")
    assert [m for m in others if not m.startswith(allowed)] == []


def test_algorithm_and_batch_import_without_megatron():
    modules = [module_of(file) for file in FILES if room_of(module_of(file)) in ("algorithm", "batch")]
    assert len(modules) > 2
    script = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for module in {modules}:
    importlib.import_module(module)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr
