"""The tests that `make test` runs for a room and for a change; see `tests/suite`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite import changes
from tests.suite.__main__ import INTEGRATIONS, TENSORFLOW, sessions
from tests.suite.changes import NothingToCompareError, changed_files, touched
from tests.suite.imports import ROOT, Imports, python_files
from tests.suite.rooms import MORE, of_room, rooms

TREE = {
    "src/weft/__init__.py": "",
    "src/weft/a/__init__.py": "",
    "src/weft/a/one.py": '"""\n>>> 1\n1\n"""\n',
    "src/weft/a/two.py": "from weft.a import one\n",
    "src/weft/a/page.css": "",
    "src/weft/cli/__init__.py": "",
    "src/weft/cli/main.py": "from weft.cli import draw, plan\n",
    "src/weft/cli/draw.py": "import weft.a.two\ndef add_parser(): ...\n",
    "src/weft/cli/plan.py": "def add_parser(): ...\n",
    "tests/__init__.py": "",
    "tests/job.py": "def work():\n    from ..weft import nothing\n    import weft.a.two\n",
    "tests/test_job.py": "SCRIPT = 'job.py'\n",
    "tests/test_text.py": "SCRIPT = '''\nimport weft.a.one\n'''\n",
    "tests/test_name.py": "COMMAND = ['-m', 'weft.a.two']\n",
    "tests/test_draw.py": "from weft.cli.main import main\nmain(['draw', 'x'])\n",
    "tests/test_plan.py": "from weft.cli.main import main\nmain(['plan', 'x'])\n",
    "tests/test_docs.py": "",
    "tests/test_css.py": "NAME = 'page.css'\nREAD = open(\"page.css\")\n",
    "docs/page.md": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("src/weft/a/one.py", {"src/weft/a/one.py", "job", "text", "name", "draw"}),
        ("src/weft/a/two.py", {"job", "name", "draw"}),
        ("src/weft/a/__init__.py", {"src/weft/a/one.py", "job", "text", "name", "draw"}),
        ("src/weft/cli/plan.py", {"plan"}),
        ("src/weft/cli/main.py", {"draw", "plan"}),
        ("tests/job.py", {"job"}),
        ("docs/page.md", {"docs"}),
        ("src/weft/a/page.css", {"src/weft/a/one.py", "job", "text", "name", "draw", "css"}),
        ("src/weft/a/gone.py", {"src/weft/a/one.py", "job", "text", "name", "draw"}),
    ],
)
def test_a_change_is_seen_by_what_uses_it(tree: Path, changed: str, told: set[str]):
    found = touched([changed], tree)
    assert found is not None
    assert {
        path.removeprefix("tests/test_").removesuffix(".py" * path.startswith("tests")) for path in found
    } == told


@pytest.mark.parametrize("changed", changes.EVERYTHING)
def test_what_all_tests_use_is_seen_by_all(tree: Path, changed: str):
    assert touched(["docs/page.md", changed], tree) is None
    assert (ROOT / changed).is_file()


def git(tree: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True)


def test_a_change_is_what_a_branch_has_and_what_is_not_committed(tree: Path):
    git(tree, "init", "-b", "main")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "one")
    git(tree, "switch", "-c", "other")
    (tree / "docs/page.md").write_text("more")
    git(tree, "commit", "-am", "two")
    (tree / "src/weft/a/one.py").unlink()
    (tree / "new file.py").write_text("")
    assert changed_files(root=tree) == ["docs/page.md", "new file.py", "src/weft/a/one.py"]
    assert changed_files("HEAD", root=tree) == ["new file.py", "src/weft/a/one.py"]
    with pytest.raises(
        NothingToCompareError, match=r"since nowhere cannot be told: .*make test CHANGED=HEAD~1"
    ):
        changed_files("nowhere", root=tree)


def test_no_checkout_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(
        NothingToCompareError, match="what changed since main cannot be told: .*not a git repository"
    ):
        changed_files(root=tmp_path)


def test_a_heart_of_the_source_is_seen_from_far_away():
    arrows = Imports(python_files())
    users = arrows.users(["src/weft/torch/execution/tape.py"])
    assert {"tests/parity/test_behaviour.py", "tests/parity/run_checks.py", "tests/fuzz/test_fuzz.py"} <= {
        *users
    }
    assert "tests/unit/schedule/test_legal.py" not in users
    assert len(arrows.users(["src/weft/report/plan/pipeline.py"])) < 40


def test_a_room_has_tests():
    found = {room: of_room(room) for room in rooms()}
    assert [path for paths in found.values() for path in paths if not (ROOT / path).exists()] == []
    assert {room for room, paths in found.items() if len(paths) < 2} == {"checks", "import_hooks"}, (
        "only doctests"
    )


def test_more_tests_are_of_rooms():
    assert {*MORE} <= {*rooms()}


def test_an_unknown_room_is_told_with_those_that_there_are():
    done = subprocess.run(
        [sys.executable, "-m", "tests.suite", "--room", "torch/spilt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "there is no room torch/spilt; there are " in done.stderr
    assert ", torch/split, " in done.stderr


def test_tensorflow_has_a_session_of_its_own():
    general, tensorflow = sessions([], "-q")
    assert {f"--ignore={path}" for path in (*TENSORFLOW, *INTEGRATIONS)} == {*general.arguments} - {"-q"}
    assert tensorflow.arguments == (*TENSORFLOW, "-q") and tensorflow.workers == 0
    both = sessions(["src/weft/compat", "tests/unit/tensorflow/test_model.py"])
    inside = ("src/weft/compat/tensorflow", "src/weft/compat/stand_ins")
    assert both[0].arguments == ("src/weft/compat", *(f"--ignore={path}" for path in inside))
    assert both[1].arguments == ("tests/unit/tensorflow/test_model.py", *inside)
    assert [each.name for each in sessions(["tests/unit/graph"])] == ["general"]
