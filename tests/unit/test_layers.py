"""A layer uses what stands above it, never what stands below; and the core stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent

CORE = (
    ("errors",),
    ("foreign",),
    ("units",),
    ("visible",),
    ("imported",),
    ("document",),
    ("checks",),
    ("config",),
    ("timeline",),
    ("graph",),
    ("topology",),
    ("schedule",),
    ("simulate",),
    ("partition",),
    ("plan",),
    ("report",),
)
EFFECTS = (("transport",), ("reduce",), ("runtime",), ("profiler",), ("launch",), ("checkpoint",), ("watch",))
FRONTENDS = (("torch", "tensorflow"), ("compat",), ("integrations",), ("cli",), ("__main__",))

LEVEL = {name: level for level, names in enumerate(CORE + EFFECTS + FRONTENDS) for name in names}
PURE = {name for names in CORE for name in names}
IMPURE = {"torch", "tensorflow", "numpy", "os", "socket", "time", "subprocess", "threading"}

FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, wherever in the file."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *base.split(".")] if base else parents)
            members = {f"{base}.{alias.name}" for alias in node.names}
            found |= {member if member in MODULES else base for member in members}
    return found


def layer_of(module: str) -> str:
    """`weft.graph.model` is of the layer `graph`, `weft` of none."""
    return module.split(".")[1] if "." in module else ""


def test_every_package_is_in_the_list():
    assert {layer_of(module) for module in MODULES} - {""} <= set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_upwards(module):
    here = layer_of(module)
    for imported in imports(MODULES[module]):
        if imported.split(".")[0] != "weft" or not layer_of(imported) or layer_of(imported) == here:
            continue
        there = layer_of(imported)
        assert here and LEVEL[there] < LEVEL[here], f"{module} may not use {imported}: {there} stands below"


@pytest.mark.parametrize("module", [name for name in MODULES if layer_of(name) in PURE | {""}])
def test_the_core_is_pure(module):
    used = {name.split(".")[0] for name in imports(MODULES[module])}
    assert not used & IMPURE, f"{module} is of the pure core and may not use {sorted(used & IMPURE)}"


def test_the_core_can_be_imported_without_a_framework():
    core = [name for name in MODULES if layer_of(name) in PURE | {""}]
    hide = "import sys; sys.modules.update(torch=None, tensorflow=None, numpy=None)"
    code = "\n".join([hide, *(f"import {name}" for name in core)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_relative_imports_are_resolved(tmp_path, monkeypatch):
    """The checks above see through `from . import x` too."""
    package = tmp_path / "weft" / "graph"
    package.mkdir(parents=True)
    path = package / "model.py"
    path.write_text("from ..torch import nothing\nfrom .units import a\nfrom . import b\nimport os.path\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path / "weft")
    assert imports(path) == {"weft.torch", "weft.graph.units", "weft.graph", "os.path"}


def test_only_recordings_ask_what_time_it_is() -> None:
    """A clock that somebody sets must not end or prolong a wait."""
    asked = {
        module_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "datetime.now", "datetime.datetime.now")
    }
    assert asked <= {"weft.profiler.recorder", "weft.watch.values"}
