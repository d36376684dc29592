"""Docstrings begin with what a caller gets."""

from __future__ import annotations

import ast
from pathlib import Path

import weft

QUESTIONS = ("What", "How", "Which", "Whether")


def test_no_docstring_begins_with_a_question_word():
    found = [
        f"{path}:{node.body[0].lineno}: {text.splitlines()[0]}"
        for path in Path(weft.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and (text := ast.get_docstring(node))
        and text.split()[0] in QUESTIONS
    ]
    assert not found, "write what a caller gets: True if ..., The number of ..."
