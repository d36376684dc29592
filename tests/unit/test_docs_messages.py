"""The messages that the documentation quotes are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("what-a-step-may-do.md", "troubleshooting.md", "several-hosts.md", "tensorflow.md")
HEADERS = ("| message begins |", "| you see |", "| the error says |")
_VALUES = re.compile(r"\.\.\.|\"[^\"]*\"|: |\b[0-9.]+\b|\b[A-Z_]{3,}\b")
"""What stands between the words of a message: values, and where messages are put together."""
SHORT = 12
"""A piece of so few characters proves nothing."""


def pieces(message: str) -> list[str]:
    """The words of a quoted message, without its values."""
    return [piece for part in _VALUES.split(message) if len(piece := part.strip(" ,;:")) > SHORT]


def quoted(page: str) -> Iterator[str]:
    """The messages in the first columns of a page's tables."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        if table.startswith(HEADERS):
            for row in table.splitlines()[2:]:
                yield from re.findall(r"`([^`]*)`", row.split(" | ")[0])


def texts(node: ast.AST) -> str:
    """Text as it stands in the code, with a line's end for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(texts, node.values))
    return "\n"


@pytest.fixture(scope="module")
def sources():
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [texts(node) for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_quoted_is_said(page, sources):
    messages = list(quoted((ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert len(messages) > 5
    assert [piece for message in messages for piece in pieces(message) if piece not in sources] == []


def test_a_message_is_told_apart_from_its_values():
    assert pieces("... was put on partition 5, but there are 2 partitions (0 to 1)") == [
        "was put on partition",
        "but there are",
    ]
    assert list(quoted("| you see | do |\n| --- | --- |\n| `one`; `two` | `three` |\n")) == ["one", "two"]
