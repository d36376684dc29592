"""`docs/api.md` shows the names that there are."""

import ast

import pytest

import weft.torch
from tests.api_page import GROUPS, PAGE, ROOT, Group, filled, find, first_paragraph, items, signature


def test_the_page_has_the_present_text():
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run `python -m tests.api_page`"


def test_every_public_name_is_in_one_group():
    named = [
        entry.partition(":")[0] for group in GROUPS if group.module == "weft.torch" for entry in group.names
    ]
    assert sorted(named) == sorted(weft.torch.__all__)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_every_name_says_what_a_caller_gets(group):
    for line in items(group):
        assert "`: " in " ".join(line.split()), f"{line} has no docstring"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_the_methods_are_there(group):
    for entry in group.names:
        name, _, methods = entry.partition(": ")
        node = find(group.module, name)
        there = (
            {each.name for each in node.body if isinstance(each, ast.FunctionDef)} if node else {"GradScaler"}
        )
        assert set(methods.split()) <= there


def test_every_guide_is_there():
    for group in GROUPS:
        assert (ROOT / "docs" / group.guide.partition("#")[0]).is_file()


def test_signatures_have_defaults_and_no_types():
    node = ast.parse(
        'def f(self, a: int, *rest: str, b: "X" = 1, **more: int) -> int:\n    """A :func:`g`."""'
    ).body[0]
    assert signature(node) == "(a, *rest, b=1, **more)"
    assert first_paragraph(node) == "A `g`."


def test_a_value_is_shown_as_what_it_is():
    assert list(items(Group("", "", ["WORLD"]))) == ["* `weft.WORLD`: the same as `weft.CommGroup.WORLD`."]
