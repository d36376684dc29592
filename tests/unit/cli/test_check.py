"""`weft check`: a script's findings as text and as JSON, with an exit code for CI."""

from __future__ import annotations

import json

import pytest

from tests.unit.check.scripts import COPIES, RIGHT, changed
from weft.cli.main import main

MODEL = """
import torch
from torch import nn

def example():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), torch.randn(30, 64)
"""


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Writes a script and checks it: the exit code, and what was printed on both streams."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *arguments: str, function: str = "") -> tuple[int, str]:
        (tmp_path / "train.py").write_text(text)
        code = main(["check", f"train.py{function}", *arguments])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def test_nothing_found(check):
    assert check(RIGHT) == (0, "train.py: nothing found\n")


def test_a_fault_has_its_place_its_reason_and_the_line_to_write(check):
    code, told = check(changed(RIGHT, ("BATCH = 32", "BATCH = 30")))
    assert code == 1
    assert told == (
        "train.py:12: wrong: a batch of 30 samples is refused, since 4 microbatches do not divide it "
        "(batch_not_divided)\n"
        "    write: DataLoader(data, batch_size=28, sampler=sampler, drop_last=True)\n"
        "train.py: 1 wrong\n"
    )


def test_a_hint_fails_nothing(check):
    code, told = check(RIGHT, "-n", "4")
    assert (code, told.splitlines()[-1]) == (0, "train.py: 1 hint")


def test_lines_to_write_stand_below_each_other(check):
    _, told = check(changed(COPIES, ("if rank == 0:\n    torch.save", "torch.save")))
    assert "    write: state = model.module.state_dict()\n           if torch" in told


def test_json(check):
    code, told = check(changed(RIGHT, ("BATCH = 32", "BATCH = 30")), "--json")
    document = json.loads(told)
    assert (code, document["weft"], document["file"]) == (1, "check", "train.py")
    assert {key: document["findings"][0][key] for key in ("rule", "grade", "line")} == {
        "rule": "batch_not_divided", "grade": "wrong", "line": 12,
    }  # fmt: skip


def test_the_model_of_a_function_is_run(check):
    code, told = check(MODEL, "--partitions", "2", "--microbatches", "4", function=":example")
    assert code == 1
    assert "train.py:5: wrong: a batch of 30 samples is refused" in told
    assert check(MODEL, "--microbatches", "3", function=":example") == (0, "train.py: nothing found\n")


def test_a_function_that_is_missing(check):
    code, told = check(MODEL, function=":other")
    assert (code, "train.py has no function other" in told) == (2, True)


@pytest.mark.parametrize("option", ["-n", "--partitions", "--microbatches"])
def test_numbers_below_one_are_refused(check, option):
    code, told = check(RIGHT, option, "0")
    assert (code, f"{option} is 0: it must be at least 1" in told) == (2, True)


def test_names_of_a_script_steer_no_terminal(check):
    text = changed(RIGHT, ("BATCH = 32", "BATCH = 30"), ("DataLoader(data,", "DataLoader(read('\x1b[2J'),"))
    assert "\x1b" not in check(text)[1]
