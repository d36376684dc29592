"""`make check` passes where TensorFlow is not installed: it runs before the tests, which install it."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import weft

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = Path(weft.__file__).parent
OWN = {"weft", "smdistributed"}


def _imported() -> dict[str, Path]:
    """The modules of other libraries that the sources import, each with a file that does."""
    found: dict[str, Path] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found.update({name.partition(".")[0]: path for name in names if name})
    return {name: path for name, path in found.items() if name not in OWN | set(sys.stdlib_module_names)}


def _needed(distribution: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The names of what `pip install distribution[extras]` installs, as far as it is installed here."""
    if (distribution, extras) in seen:
        return set()
    seen.add((distribution, extras))
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return set()
    needed = {distribution}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": e}) for e in extras | {""}
        ):
            needed |= _needed(requirement.name.lower().replace("_", "-"), frozenset(requirement.extras), seen)
    return needed


def test_mypy_is_told_of_each_library_that_a_developer_may_lack() -> None:
    settings = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text())
    told = {
        name.partition(".")[0]
        for override in settings["tool"]["mypy"]["overrides"]
        if override.get("ignore_missing_imports")
        for name in override["module"]
    }
    developers = _needed("weft", frozenset({"dev"}), set())
    owners = metadata.packages_distributions()
    lacking = {
        module: path
        for module, path in _imported().items()
        if module not in told
        and module in owners
        and not developers & {owner.lower().replace("_", "-") for owner in owners[module]}
    }
    assert not lacking, f"not installed by weft[dev]: name them in mypy's overrides: {lacking}"
