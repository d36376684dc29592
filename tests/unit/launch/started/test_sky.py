"""Jobs that SkyPilot has: a program in the place of `sky` writes down what it is given, and ends as it is told."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from weft.errors import JobError, LaunchError
from weft.launch import Job
from weft.launch.started.sky import SkyHandle

SKY = """\
#!/bin/sh
printf '%s\\n' "$*" >> {folder}/asked
[ "$1" = cancel ] && touch {folder}/cancelled && exit 0
printf '%s' "$HF_TOKEN" > {folder}/secret
cat {folder}/says
[ -e {folder}/stays ] || exit $(cat {folder}/code)
for _ in $(seq 600); do [ -e {folder}/cancelled ] && exit 103; sleep 0.1; done
"""
SAYS = """\
\x1b[2m⚙︎ Job submitted, ID: 7\x1b[0m
\x1b[36m(head, rank=0, pid=7)\x1b[0m [default0]:zero
\x1b[36m(worker1, rank=1, pid=8, ip=10.0.0.2)\x1b[0m [default0]:two
(worker1, rank=1, pid=8, ip=10.0.0.2) [default1]:weft: rank 3 on w (pid 9) failed in step 2: ValueError: boom
ERROR: Job 7 failed with return code list: [0, 1]
"""


def start(folder: Path, code: int = 0, **more: Any) -> SkyHandle:
    (folder / "sky").write_text(SKY.format(folder=folder))
    (folder / "sky").chmod(stat.S_IRWXU)
    (folder / "says").write_text(SAYS)
    (folder / "code").write_text(str(code))
    (folder / "train.py").touch()
    job = Job(
        "train.py", ["a b"], engine="skypilot", hosts=2, ranks_per_host=2, folder=str(folder), hand_on=["HF_TOKEN"],
        **more,
    )  # fmt: skip
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "HF_TOKEN": "0123456", "WEFT_TOKEN": "abcdef"}
    handle = job.start(environ)
    assert isinstance(handle, SkyHandle)
    return handle


def test_a_job_that_ends_well(tmp_path: Path):
    handle = start(tmp_path, log_dir="runs/a")
    assert handle.wait(60) == 0
    launched = "launch --yes --cluster=train --secret HF_TOKEN --secret WEFT_TOKEN train-task.yaml\n"
    assert (tmp_path / "asked").read_text() == launched
    assert (tmp_path / "secret").read_text() == "0123456"
    text = (tmp_path / "train-task.yaml").read_text()
    assert "0123456" not in text and "PYTHONUNBUFFERED" in text
    assert handle.output == tmp_path / "runs/a/train-sky.log"
    assert (handle.logs(0), handle.logs(1), handle.logs(2)) == ("zero\n", "", "two\n")
    with pytest.raises(LaunchError, match="there is no rank 4: the job has 4"):
        handle.logs(4)


def test_the_error_names_the_culprit(tmp_path: Path):
    handle = start(tmp_path, 100)
    with pytest.raises(
        JobError, match="^weft: rank 3 on w .* boom\nthe job train ended with exit code 100"
    ) as told:
        handle.wait(60)
    assert (told.value.code, told.value.rank) == (100, 3)
    assert "SkyPilot: failed with return code list: [0, 1]" in str(told.value)


def test_stop_cancels_the_job(tmp_path: Path):
    (tmp_path / "stays").touch()
    handle = start(tmp_path)
    deadline = time.monotonic() + 60
    while "ID: 7" not in handle.output.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert handle.poll() is None
    assert handle.stop() == 103
    assert (tmp_path / "asked").read_text().splitlines()[1:] == ["cancel --yes train 7"]


def test_without_sky(tmp_path: Path):
    (tmp_path / "train.py").touch()
    job = Job("train.py", engine="skypilot", folder=str(tmp_path))
    with pytest.raises(LaunchError, match="there is no command sky: pip install 'skypilot"):
        job.start({"PATH": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
