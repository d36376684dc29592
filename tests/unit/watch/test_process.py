"""What weft asks of the operating system about processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.watch.process import launcher_left

CHILD = """
import os, sys, time
from weft.watch.process import die_with_parent
print("imported", flush=True)
sys.stdin.read()
os._exit = lambda code: print("ends", flush=True)
die_with_parent()
print("end", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's end")
@pytest.mark.parametrize("ends", [True, False])
def test_a_process_whose_parent_ended_after_the_import_ends(ends: bool, tmp_path: Path):
    """A launcher may be killed before a script comes to weft.init, and then no signal comes."""
    reading, writing = os.pipe()
    out = tmp_path / "out"
    between = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdin={reading})
while "imported" not in open({str(out)!r}).read():
    time.sleep(0.01)
{"sys.exit()" if ends else "child.wait()"}
"""
    with out.open("w") as file:
        parent = subprocess.Popen([sys.executable, "-c", between], stdout=file, pass_fds=[reading])
    if ends:
        assert parent.wait(30) == 0
    os.close(writing)
    os.close(reading)
    assert parent.wait(30) == 0
    deadline = time.monotonic() + 30
    while "end\n" not in out.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert out.read_text().split() == ["imported", *(["ends"] if ends else []), "end"]


def test_a_launcher_that_listens_no_more_has_left():
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"656080896.0;tcp4://127.0.0.1:{server.getsockname()[1]}"
        assert not launcher_left({"PMIX_SERVER_URI4": uri})
    assert launcher_left({"PMIX_SERVER_URI4": uri})
    assert not launcher_left({})
    for other in (
        "",
        "nothing",
        "1.0;tcp4://127.0.0.1:99999",
        "1.0;tcp4://127.0.0.999:1",
        "1.0;tcp6://::1:1",
    ):
        assert not launcher_left({"PMIX_SERVER_URI2": other}), other
