"""The tests that a change can touch: those that use one of its files, by imports and by name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.suite.imports import ROOT, Imports, python_files

EVERYTHING = ("conftest.py", "tests/conftest.py", "pyproject.toml", "constraints.txt")
"""All tests use these."""
MAIN = ("origin/main", "main")
"""Commits that a change is measured from: the first of these that is there."""


class NothingToCompareError(Exception):
    """There is no commit to compare with; the text says what to type."""


def changed_files(base: str = "", root: Path = ROOT) -> list[str]:
    """Files that differ from `base`, committed or not; without it from where this branch left the main branch.

    Raises:
        NothingToCompareError: There is no such commit, or no git.
    """
    try:
        start = _git(root, "merge-base", "HEAD", base or _main(root)).strip()
        changed = _git(root, "diff", "--name-only", "-z", start)
        new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise NothingToCompareError(
            f"what changed since {base or 'main'} cannot be told: {told.strip()}; name a commit that is here, as in "
            "make test CHANGED=HEAD~1"
        ) from error
    return sorted({*filter(None, f"{changed}{new}".split("\0"))})


def touched(changed: Iterable[str], root: Path = ROOT) -> list[str] | None:
    """Test files, and source files with doctests, that use one of the `changed` files; None: all of them do."""
    files = python_files(root)
    used: set[str] = set()
    for path in changed:
        if path in EVERYTHING:
            return None
        used |= {path} if path in files else _readers(path, files, root)
    return [path for path in Imports(files, root).users(used) if _has_tests(path, root)]


def _readers(path: str, files: Iterable[str], root: Path) -> set[str]:
    """The Python files that may read a file that is none, or one that is gone: those beside it, those that name it.

    Documentation is read by its tests.
    """
    name, folder = Path(path).name, str(Path(path).parent)
    found = {each for each in files if str(Path(each).parent) == folder and folder != "."}
    if path.endswith(".md"):
        found |= {each for each in files if Path(each).name.startswith("test_docs")}
    return found | {each for each in files if f'{name}"' in (root / each).read_text(encoding="utf-8")}


def _has_tests(path: str, root: Path) -> bool:
    if path.startswith("src/"):
        return ">>> " in (root / path).read_text(encoding="utf-8")
    return Path(path).name.startswith("test_")


def _main(root: Path) -> str:
    known = _git(root, "for-each-ref", "--format=%(refname:short)").split()
    return next((name for name in MAIN if name in known), "HEAD")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout
