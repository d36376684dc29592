"""The page of all names shows those that there are."""

import ast

import pytest

import weft.torch
from tests.api_page import PAGE, ROOT, SECTIONS, Group, filled, find, first_paragraph, items, signature

GROUPS = [group for groups in SECTIONS.values() for group in groups]


def test_the_page_has_the_present_text():
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run `python -m tests.api_page`"


def named(module):
    return sorted(
        entry.partition(":")[0] for group in GROUPS if group.module == module for entry in group.names
    )


def test_every_public_name_is_in_one_group():
    assert named("weft.torch") == sorted(weft.torch.__all__)


def test_every_public_name_of_tensorflow_is_in_one_group():
    pytest.importorskip("tensorflow")
    import weft.tensorflow
    import weft.tensorflow.data_parallel

    assert named("weft.tensorflow") == sorted(weft.tensorflow.__all__)
    names = {*weft.tensorflow.data_parallel.__all__} - {"keras"}  # a module, with a group of its own
    assert named("weft.tensorflow.data_parallel") == sorted(names)


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


def test_a_class_has_what_it_inherits_from_its_file(tmp_path, monkeypatch):
    source = "class Base:\n    def run(self, a): ...\nclass One(Base, Other):\n    def stop(self): ...\n"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "made.py").write_text(source)
    monkeypatch.setattr("tests.api_page.ROOT", tmp_path)
    assert [each.name for each in find("made", "One").body] == ["stop", "run"]


def test_a_value_is_shown_as_what_it_is():
    assert list(items(Group("", "", ["WORLD"]))) == ["* `weft.WORLD`: the same as `weft.CommGroup.WORLD`."]
