"""The files that a file of this repository uses: what it imports, and what its text names.

Tests start scripts by name, and hold scripts as text. So a string that is the name of a file or a module counts as an
import, and so does a line within a string that imports something.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples")
COMMANDS = "src/weft/cli/main.py"
"""It imports every command, and runs one: who uses it, uses the commands whose names stand in its text."""
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


def python_files(root: Path = ROOT) -> list[str]:
    """Paths of all Python files, relative to the repository."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")] + [*root.glob("*.py")]
    return sorted(str(path.relative_to(root)) for path in found)


class Imports:
    """The arrows between `files`: what each uses at once (`uses`), and all that use it in the end (`users`)."""

    def __init__(self, files: Iterable[str], root: Path = ROOT) -> None:
        self.root = root
        self.files = frozenset(files)
        self._by_name: Mapping[str, list[str]] = _grouped(
            (file.rpartition("/")[2], file) for file in self.files
        )
        self._modules = {_module(file): file for file in self.files}
        self._commands = self._found_commands()

    def uses(self, file: str) -> frozenset[str]:
        """The files that `file` uses at once."""
        tree = ast.parse((self.root / file).read_text(encoding="utf-8"))
        found = self._of_module(_module(file).rpartition(".")[0])  # the packages around it
        for node in ast.walk(tree):
            if isinstance(node, (ast.List, ast.Tuple)):
                found |= self._command(file, node.elts)
            elif isinstance(node, ast.Call):
                found |= self._command(file, node.args)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found |= self._of_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(file, node)
                found |= self._of_module(base)
                for alias in node.names:
                    found |= self._of_module(f"{base}.{alias.name}", strict=True)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and file.startswith("tests/"):
                found |= self._named(file, node.value)
        if file == COMMANDS:
            found = {each for each in found if not each.startswith("src/weft/cli/")}
        return frozenset(found - {file})

    def users(self, files: Iterable[str]) -> list[str]:
        """All files that use one of `files` in the end, and these themselves."""
        users: dict[str, set[str]] = defaultdict(set)
        for file in self.files:
            for used in self.uses(file):
                users[used].add(file)
        seen = {*files} & self.files
        todo = [*seen]
        while todo:
            new = users[todo.pop()] - seen
            seen |= new
            todo += new
        return sorted(seen)

    def _found_commands(self) -> dict[str, str]:
        """The file of each command, by its name."""
        return {
            (Path(file).parent.name if Path(file).stem == "command" else Path(file).stem): file
            for file in self.files
            if file.startswith("src/weft/cli/")
            and file != COMMANDS
            and not file.endswith("__init__.py")
            and "add_parser" in (self.root / file).read_text(encoding="utf-8")
        }

    def _of_module(self, name: str, strict: bool = False) -> set[str]:
        """The file of a module, with those of the packages around it. Not `strict`: or of what holds the name."""
        parts = name.split(".")
        while parts and ".".join(parts) not in self._modules:
            if strict:
                return set()
            parts.pop()
        return {
            self._modules[above]
            for above in (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            if above in self._modules
        }

    def _command(self, file: str, words: Sequence[ast.expr]) -> set[str]:
        """The file of the command that a list of arguments begins with."""
        first = words[0] if words and file.startswith("tests/") else None
        name = first.value if isinstance(first, ast.Constant) else None
        return {self._commands[name]} if isinstance(name, str) and name in self._commands else set()

    def _named(self, file: str, text: str) -> set[str]:
        """The files that a string names."""
        if "\n" in text:
            return {found for name in _IMPORT.findall(text) for found in self._of_module(name)}
        if text.endswith(".py"):
            alike = [
                each
                for each in self._by_name.get(text.rpartition("/")[2], ())
                if f"/{each}".endswith(f"/{text}")
            ]
            near = [each for each in alike if each.startswith(str(Path(file).parent) + "/")]
            return {*(near or alike)}
        if "." in text and " " not in text:
            return self._of_module(text.partition(":")[0], strict=True)
        return set()


def _module(file: str) -> str:
    parts = Path(file.removeprefix("src/")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _absolute(file: str, node: ast.ImportFrom) -> str:
    """The module that a `from` names, also where it is a relative one."""
    if not node.level:
        return node.module or ""
    package = Path(file.removeprefix("src/")).parent.parts
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def _grouped(pairs: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found
