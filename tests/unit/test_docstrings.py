"""Docstrings begin with what a caller gets; those that begin with a question word become fewer."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import weft

LEFT = {"What": 171, "How": 44, "Which": 14, "Whether": 3}
"""How many docstrings of functions, classes and modules still begin so. Lower the number where you mend some."""


def test_no_more_docstrings_begin_with_a_question_word():
    found = Counter(
        text.split()[0]
        for path in Path(weft.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and (text := ast.get_docstring(node))
    )
    assert {word: found[word] for word in LEFT} == LEFT, (
        "write what a caller gets: True if ..., The number of ..."
    )
