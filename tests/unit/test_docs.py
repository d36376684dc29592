"""What the documentation shows, runs.

```python        runs as a script in a process of its own; as the first line
                 `# run: 2 processes` runs it under `weft run -n 2`; one that imports
                 TensorFlow is skipped where that is not installed
```console       lines that begin with `$ weft` run, from the repository's root; the lines
                 below are printed, `...` stands for anything
```text, none    is not run
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import warm
from tests.long import long, one_in
from tests.parity.tensorflow import jobs

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
LINKING = sorted(
    [
        *PAGES,
        ROOT / "CONTRIBUTING.md",
        ROOT / "tests" / "README.md",
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
)

_FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMED = re.compile(r"\b(?:docs|tests)/[\w./-]+?\.md(?:#[\w-]+)?")
MADE_UP = "docs/page.md"
"""A page that tests of the suite make up."""
_PROCESSES = re.compile(r"# run: (\d+) processes(?:, (.+))?\n")


class Block(NamedTuple):
    """A fenced block and where it stands."""

    where: str
    language: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(f"{page.name}:{text[: match.start()].count(chr(10)) + 1}", match[2], _dedent(match))
        for match in _FENCE.finditer(text)
        if match[2] == language
    ]


def _dedent(match: re.Match[str]) -> str:
    return "".join(line.removeprefix(match[1]) for line in match[3].splitlines(keepends=True))


def shown(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block, with what is shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found and line:
            found[-1][1].append(line)
    return [(command, lines) for command, lines in found if command.startswith("weft")]


def as_pattern(line: str) -> str:
    """A line in which `...` stands for anything."""
    return ".*".join(map(re.escape, line.rstrip().split("...")))


def run(arguments: list[str], directory: Path, start: Callable[..., tuple[int, str]] = warm.run) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    code, output = start(arguments, environ, directory, timeout=500)
    assert code == 0, f"{shlex.join(arguments)}\n{output}"
    return output


def needs_tensorflow(text: str) -> bool:
    """Whether a script imports TensorFlow: its ranks then import that anew, for it does not survive a fork."""
    return "import tensorflow" in text or "weft.tensorflow" in text


def links(page: Path) -> list[str]:
    """What a page links to in this repository."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in _LINK.findall(text) if not target.startswith(("http:", "https:"))]


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


SCRIPTS = [block for page in PAGES for block in blocks(page, "python")]
COMMANDS = [
    (block.where, *command)
    for page in PAGES
    for block in blocks(page, "console")
    for command in shown(block.text)
]


@pytest.mark.parametrize(
    "block",
    one_in(
        5,
        [
            pytest.param(block, marks=[long] if needs_tensorflow(block.text) else [], id=block.where)
            for block in SCRIPTS
        ],
    ),
)
def test_scripts_run(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block.text, encoding="utf-8")
    processes = _PROCESSES.match(block.text)
    if "import keras" in block.text and importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    if needs_tensorflow(block.text):
        pytest.importorskip("tensorflow")
        run(["run", "-n", processes[1] if processes else "1", str(script)], tmp_path, jobs.run)
        return
    launcher = ["run", "-n", processes[1], *(processes[2] or "").split()] if processes else []
    run([*launcher, str(script)], tmp_path)


@pytest.mark.parametrize(
    ("where", "command", "lines"), one_in(5, COMMANDS), ids=[where for where, *_ in COMMANDS]
)
def test_commands_print_what_is_shown(where, command, lines):
    output = run(shlex.split(command)[1:], ROOT)
    told = [line.rstrip() for line in output.splitlines()]
    for line in lines:
        assert any(re.fullmatch(as_pattern(line), each) for each in told), f"{where}: {line}\n{output}"


@pytest.mark.parametrize("page", LINKING, ids=[str(page.relative_to(ROOT)) for page in LINKING])
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{page.name} links to {target}"


def named_pages(text: str) -> list[str]:
    """Pages, some with a section, that code names in errors, help texts and docstrings."""
    return _NAMED.findall(text)


def test_pages_that_the_code_names_are_there():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    wrong = []
    for path in files:
        for target in {*named_pages(path.read_text(encoding="utf-8"))} - {MADE_UP}:
            name, _, anchor = target.partition("#")
            page = ROOT / name
            if not page.is_file() or (anchor and anchor not in anchors(page)):
                wrong.append(f"{path.relative_to(ROOT)} names {target}")
    assert not wrong, "\n".join(wrong)


def test_pages_are_found_in_code():
    text = 'see "docs/settings.md#inputs-checked", `docs/design/rooms.md`, docs/safetensors: 1'
    assert named_pages(text) == ["docs/settings.md#inputs-checked", "docs/design/rooms.md"]


def test_no_page_has_marks_of_an_unfinished_merge():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]:
        assert not re.search(r"^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE), page


def test_the_contents_have_each_page_once():
    contents = ROOT / "docs" / "README.md"
    pages = sorted(page.name for page in contents.parent.glob("*.md") if page != contents)
    assert sorted(target for target in links(contents) if "/" not in target) == pages


def test_blocks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n```python\n# run: 2 processes\nx = 1\n```\n\n  ```python\n  if x:\n      y = 1\n  ```\n"
        "```console\n$ weft run \\\n    -n 2\nout\n$ ls\n```\n```text\nno\n```\n",
        encoding="utf-8",
    )
    assert blocks(page, "python") == [
        Block("page.md:2", "python", "# run: 2 processes\nx = 1\n"),
        Block("page.md:7", "python", "if x:\n    y = 1\n"),
    ]
    ((command, lines),) = shown(blocks(page, "console")[0].text)
    assert command.split() == ["weft", "run", "-n", "2"] and lines == ["out"]


def test_dots_stand_for_anything():
    assert re.fullmatch(as_pattern("step ... ms (all)"), "step 3.5 ms (all)")
    assert not re.fullmatch(as_pattern("step 3.5"), "step 335")
