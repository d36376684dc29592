from pathlib import Path

import pytest

from tests.golden.timelines import DRAWINGS, FOLDER, STEP
from weft.timeline import KINDS


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_picture_is_as_it_was(name: str):
    kept = Path(FOLDER, name).read_text(encoding="utf-8")
    assert kept == DRAWINGS[name](), "if the change is meant, run `python -m tests.golden.timelines` and look"


def test_every_kind_is_in_it():
    assert {span.kind for span in STEP.spans} == set(KINDS)
