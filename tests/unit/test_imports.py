"""Imports go one way, those inside functions included; torch and ctypes stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "dspine"

LAYERS = (
    {"errors", "architectures", "machine", "measured"},
    {"ggml"},
    {"kernels"},
    {"files", "llama", "settings", "text"},
    {"default_pair", "drafters", "plan", "train"},
    {"engine"},
    {"bench", "doctor", "server"},
    {"cli", "__init__"},
)
"""Files and folders of the package; each may import from those of earlier rows and itself."""

PROGRAMS = {"kernels/__main__.py"}
"""Stands above what it prepares."""

MODULES = sorted(file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py"))


def imported(path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            yield from (f"{module}.{name.name}" for name in node.names)


def top(module: str) -> str:
    return module.partition(".")[0]


def part(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def row(name: str) -> int:
    found = [index for index, names in enumerate(LAYERS) if name in names]
    assert len(found) == 1, f"say in LAYERS where {name} belongs"
    return found[0]


@pytest.mark.parametrize("path", MODULES)
def test_imports_go_one_way(path: str) -> None:
    own = part(path)
    for module in imported(path):
        first, _, rest = module.partition(".")
        other = rest.split(".")[0]
        if first == "dspine" and other != own and path not in PROGRAMS:
            assert row(other) < row(own), f"{path} imports {module}"


def users(package: str) -> set[str]:
    """Parts of dspine that import something of another package."""
    return {part(path) for path in MODULES for name in imported(path) if top(name) == package}


def test_torch_is_needed_by_training_alone() -> None:
    assert users("torch") == {"train"}


def test_pointers_stay_below_the_engine() -> None:
    assert users("ctypes") <= {"ggml", "kernels", "llama"}
