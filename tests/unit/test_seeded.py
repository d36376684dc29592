"""The seeded faults fit the source as it is: see `tests/seeded`."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from tests.seeded.__main__ import put_into
from tests.seeded.faults import FAULTS, Fault
from tests.suite.rooms import rooms

ROOT = Path(weft.__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.room)
def test_a_fault_fits_its_file(fault: Fault):
    text = (ROOT / "src" / "weft" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1 and fault.old != fault.new
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert f"src/weft/{fault.file}".startswith(rooms()[fault.room])


def test_each_room_has_one_at_most():
    assert len({fault.room for fault in FAULTS}) == len(FAULTS) >= 60


def test_the_file_is_as_before_after_a_fault(tmp_path: Path):
    path = tmp_path / "src" / "weft" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    with put_into(tmp_path, Fault("a", "a.py", "1", "2", "")):
        assert path.read_text() == "x = 2\n"
    assert path.read_text() == "x = 1\n"
