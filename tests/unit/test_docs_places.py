"""Files, modules and functions that the documentation names are there."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.test_docs import LINKING, ROOT
from tests.unit.test_layers import CORE, EFFECTS, FRONTENDS, MAY_USE, MODULES, ROOMS

PACKAGE = ROOT / "src" / "weft"

_ROW = re.compile(r"^\|.*\| `([\w/]+\.py)` \| (`[\w.]+`(?:, `[\w.]+`)*) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.]+(?:/[\w.]+)+\.py")
_NAME = re.compile(r"weft(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)*")


class Place(NamedTuple):
    """A row of a table that leads to a function."""

    path: str
    names: tuple[str, ...]


def places(text: str) -> list[Place]:
    return [Place(path, tuple(_CODE.findall(names))) for path, names in _ROW.findall(text)]


def defined(source: str) -> set[str]:
    """What a file defines or imports: functions, classes and their methods (`Tape.send`), constants."""
    found: set[str] = set()
    todo: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while todo:
        above, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found.add(f"{above}{child.name}")
                if isinstance(child, ast.ClassDef):
                    todo.append((f"{above}{child.name}.", child))
            elif isinstance(child, ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in child.names}
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found |= {f"{above}{target.id}" for target in targets if isinstance(target, ast.Name)}
    return found


def is_there(name: str) -> bool:
    """Whether a dotted name is a module of weft, or what a module defines or imports."""
    module = name
    while module not in MODULES:
        module = module.rpartition(".")[0]
    rest = name.removeprefix(module).lstrip(".")
    return not rest or rest in defined(MODULES[module].read_text(encoding="utf-8"))


def files(path: str, page: Path) -> list[Path]:
    """Where a path may lead from: the repository, the sources, the package, or the page."""
    return [above / path for above in (ROOT, ROOT / "src", PACKAGE, PACKAGE / "torch", page.parent)]


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


WALKS = places((ROOT / "docs" / "design" / "where-in-the-code.md").read_text(encoding="utf-8"))


def test_the_walks_are_read():
    assert len(WALKS) > 60


@pytest.mark.parametrize("place", sorted(set(WALKS)), ids=lambda place: f"{place.path}:{place.names[0]}")
def test_the_walks_lead_to_functions(place):
    path = PACKAGE / place.path
    assert path.exists(), f"docs/design/where-in-the-code.md names src/weft/{place.path}, which is not there"
    missing = [name for name in place.names if name not in defined(path.read_text(encoding="utf-8"))]
    assert not missing, f"docs/design/where-in-the-code.md: src/weft/{place.path} has no {', '.join(missing)}"


@pytest.mark.parametrize("page", LINKING, ids=[str(page.relative_to(ROOT)) for page in LINKING])
def test_paths_and_modules_are_there(page):
    codes = _CODE.findall(without_blocks(page))
    wrong = [
        code for code in codes if _PATH.fullmatch(code) and not any(f.exists() for f in files(code, page))
    ]
    modules = [code.partition("(")[0] for code in codes]
    wrong += [name for name in modules if _NAME.fullmatch(name) and documented(name) and not is_there(name)]
    assert not wrong, f"{page.relative_to(ROOT)} names what is not there: {', '.join(wrong)}"


def documented(name: str) -> bool:
    """Whether a name is a module's, and not one that scripts know (`weft.init`, `weft.amp.GradScaler`)."""
    return ".".join(name.split(".")[:2]) in MODULES


def drawn(line: str, names: set[str]) -> list[str]:
    """The names in a line of a drawing, up to the first word of its comment."""
    return [*itertools.takewhile(names.__contains__, line.replace(">", " ").split())]


def test_the_drawings_are_those_of_the_layers():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    layers, *drawings = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[: 1 + len(ROOMS)]
    for drawing, rooms in zip(drawings, ROOMS.values(), strict=True):
        known = {name for names in rooms for name in names} - {"graph_file"}  # a former name
        lines = [{*drawn(line, known)} for line in drawing.splitlines()]
        assert [line for line in lines if line] == [{*names} for names in reversed(rooms) if known & {*names}]
    order = [names for names in CORE + EFFECTS + FRONTENDS]
    known = {name for names in order for name in names}
    found = [word for line in layers.splitlines() for word in drawn(line, known)]
    assert found == [name for names in reversed(order) for name in names]
    for frontend, rooms in MAY_USE.items():
        table = text.partition(f"| room of `weft.{frontend}` |")[2].partition("\n\n")[0]
        assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} >= rooms.keys()


def test_words_lead_to_files():
    text = (ROOT / "docs" / "design" / "where-in-the-code.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\|[^|]*\|[^|]*\| (`.*`) \|$", text.partition("## Words")[2], re.MULTILINE)
    paths = [path for cell in cells for path in _CODE.findall(cell)]
    assert len(paths) > 35
    assert [path for path in paths if not (PACKAGE / path).is_file()] == []


def test_what_is_not_there_is_found(tmp_path):
    text = "| 1 | it runs | `a/b.py` | `One.two`, `three` |\n| a | `a/b.py` | text |\n"
    assert places(text) == [Place("a/b.py", ("One.two", "three"))]
    source = "class One:\n    def two(self): ...\n    at: int = 1\n\nTHREE = 3\n"
    assert defined(source) == {"One", "One.two", "One.at", "THREE"}
    assert is_there("weft.torch.execution.tape.Tape") and is_there("weft.torch.join")
    assert not is_there("weft.torch.self_check.TESTED") and not is_there("weft.partition.turn")
    page = tmp_path / "page.md"
    page.write_text("`weft/nowhere.py` and `weft.runtime.heartbeat`\n```text\n`weft/hidden.py`\n```\n")
    assert _CODE.findall(without_blocks(page)) == ["weft/nowhere.py", "weft.runtime.heartbeat"]
    assert documented("weft.runtime.heartbeat") and not is_there("weft.runtime.heartbeat")
