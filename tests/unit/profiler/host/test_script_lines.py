"""Lines of the script between steps are found, with whether they sleep."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest

from weft.errors import FormatError
from weft.profiler.host import script_lines
from weft.profiler.recorder import SCRIPT


def sleeps() -> None:
    time.sleep(0.2)


def computes() -> None:
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize(("what", "asleep"), [(sleeps, True), (computes, False)])
def test_a_line_between_steps_is_found(tmp_path: Path, what, asleep: bool):
    recorder = SimpleNamespace(folder=tmp_path, between_steps=time.perf_counter())
    close = script_lines.watch(recorder, 3)
    what()
    close()
    rank, lines = script_lines.read_script_lines(tmp_path / f"rank3{SCRIPT}")
    assert rank == 3
    first = what.__code__.co_firstlineno
    own = [line for line in lines if line.file == __file__ and first < line.line <= first + 3]
    assert own and own[0].text in Path(__file__).read_text()
    assert (sum(line.asleep_s for line in own) > sum(line.computing_s for line in own)) is asleep


def test_steps_are_left_out(tmp_path: Path):
    close = script_lines.watch(SimpleNamespace(folder=tmp_path, between_steps=None), 0)
    sleeps()
    close()
    assert script_lines.read_script_lines(tmp_path / f"rank0{SCRIPT}") == (0, ())


def frame(*files: str) -> FrameType:
    """A stack in these files, the outermost first."""
    space: dict[str, object] = {"sys": sys}
    for number, file in enumerate(files):
        inner = f"f{number + 1}()" if number + 1 < len(files) else "sys._getframe()"
        exec(compile(f"def f{number}():\n    return {inner}", file, "exec"), space)
    return space["f0"]()  # type: ignore[operator]


def test_the_innermost_own_line_counts_unless_weft_is_nearer():
    weft, torch = script_lines.__file__, "/x/site-packages/torch/nn.py"
    assert script_lines.own_place(frame("/a/train.py", "/a/data.py")) == ("/a/data.py", 2)
    assert script_lines.own_place(frame("/a/train.py", torch)) == ("/a/train.py", 2)
    assert script_lines.own_place(frame("/a/train.py", weft, torch)) is None


def test_a_damaged_file_is_refused(tmp_path: Path):
    path = tmp_path / f"rank0{SCRIPT}"
    path.write_text('{"weft": "script", "version": 1, "lines": [{"file": "a", "line": -1}]}')
    with pytest.raises(FormatError, match="rank0.script.json"):
        script_lines.read_script_lines(path)
