"""The folder of a save while it is written."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.folder import Lock, Writer
from weft.checkpoint.names import SAVING


def test_what_a_dead_job_began_goes_unless_another_may_still_write_it(tmp_path: Path):
    locks: dict[Path, Lock] = {}
    dead, running = tmp_path / f"{SAVING}dead-1", tmp_path / f"{SAVING}running-2"
    dead.mkdir()
    Writer(tmp_path, "a", None, lambda phase: None).begin(locks)
    assert not dead.exists()
    (lock,) = locks.values()
    lock.exclusive = False  # a file system without locks
    running.mkdir()
    Writer(tmp_path, "b", None, lambda phase: None).begin(locks)
    assert running.exists()
    lock.close()
