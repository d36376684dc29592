"""The page of memory in which ranks show what they do."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from weft.errors import LaunchError
from weft.watch.heartbeat import Page, Sign, State


def test_a_rank_that_never_started_shows_nothing():
    page = Page.private(2)
    assert page.sign(1) == Sign()
    page.slot(1).stand("opens /data/" + "x" * 300 + "/part-3", 4.0)  # somebody else sees that of it
    assert page.sign(1).operation_s == 4.0
    assert page.sign(1).operation.startswith("opens /data/xx") and page.sign(1).operation.endswith(
        "xx/part-3"
    )
    page.slot(1).stand("", 0.0)
    assert page.sign(1) == Sign()
    assert page.report(1) == "" and page.leader == "" and not page.ending


def test_what_one_process_writes_another_one_reads():
    page, descriptor = Page.create(3)
    try:
        other = Page.attach(descriptor)
        slot = other.slot(2)
        slot.open(heartbeat=30.0, stall=600.0)
        slot.note("forward", 3, 1, "layers.0", peer=0)
        slot.beat()
        sign = page.sign(2)
        assert (sign.state, sign.pid, sign.beat, sign.notes) == (State.RUNNING, os.getpid(), 1, 1)
        assert (sign.heartbeat, sign.stall) == (30.0, 600.0)
        assert (sign.step, sign.microbatch, sign.peer) == (3, 1, 0)
        assert (sign.phase, sign.module) == ("forward", "layers.0")
        assert [rank for rank, seen in page.signs().items() if seen.state is not State.ABSENT] == [2]
        other.leader = "here"
        other.end()
        assert page.leader == "here" and page.ending
    finally:
        os.close(descriptor)


def test_a_page_is_private_to_those_who_inherit_it():
    _, descriptor = Page.create(1)
    try:
        assert not os.get_inheritable(descriptor)
        assert os.fstat(descriptor).st_nlink == 0
    finally:
        os.close(descriptor)


def test_a_page_without_memfd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    page, descriptor = Page.create(1)
    Page.attach(descriptor).leader = "here"
    os.close(descriptor)
    assert page.leader == "here"


@pytest.mark.parametrize("content", [b"", b"x" * 8192])
def test_a_foreign_file_is_refused(content: bytes):
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(LaunchError, match="is not the one that `weft run` shares with its ranks"):
            Page.attach(file.fileno())
    with pytest.raises(LaunchError, match="file descriptor 999 is not"):
        Page.attach(999)


def test_the_step_stays_and_the_rest_does_not():
    page = Page.private(1)
    slot = page.slot(0)
    slot.open(1, 1)
    slot.note("forward", 3, 1, "layers.0", peer=1)
    slot.note("wait")
    sign = page.sign(0)
    assert (sign.step, sign.notes) == (3, 2)
    assert (sign.microbatch, sign.peer, sign.phase, sign.module) == (None, None, "wait", "")
    assert sign.waiting


def test_long_and_evil_names():
    page = Page.private(1)
    slot = page.slot(0)
    slot.open(1, 1)
    slot.note("p" * 50, module="a" * 200 + ".last")
    sign = page.sign(0)
    assert sign.module.startswith("..a") and sign.module.endswith(".last") and len(sign.module) == 104
    assert len(sign.phase) == 24
    slot.note("forward", module="\x1b[2Jclear\n")
    assert page.sign(0).module == "\\x1b[2Jclear\\n"


def test_slots_do_not_touch_each_other():
    page = Page.private(2)
    page.slot(0).open(1, 1)
    page.write_report(0, "x" * page.report_limit)
    page.slot(1).open(1, 1)
    assert page.report(0) == "x" * page.report_limit
    assert page.report(1) == ""
    with pytest.raises(ValueError, match="do not fit into"):
        page.write_report(0, "x" * (page.report_limit + 1))


def test_a_sign_survives_json():
    sign = Sign(State.FINISHING, 7, 3, 30.0, 600.0, 2, 3, 1, 9, 0, "forward", "layers.0", "node")
    assert Sign.from_dict(json.loads(json.dumps(sign.as_dict()))) == sign


@pytest.mark.parametrize(
    ("sign", "text"),
    [
        (Sign(), ""),
        (Sign(step=3), "step 3"),
        (Sign(microbatch=0, phase="forward"), "microbatch 0, forward"),
        (Sign(step=0, phase="backward", module="a.b"), "step 0, backward of a.b"),
        (Sign(module="a.b"), "a.b"),
    ],
)
def test_where_a_rank_is(sign: Sign, text: str):
    assert sign.where() == text
    assert sign.last_seen() == (f"; last seen in {text}" if text else "")


def test_steps_for_evaluation_are_counted_apart():
    page = Page.private(1)
    slot = page.slot(0)
    slot.open(1, 1)
    slot.note("forward", 3, 1)
    assert page.sign(0).where() == "step 3, microbatch 1, forward"
    slot.count_evaluations(2, True)
    slot.note("forward", 5, 0)
    assert page.sign(0).where() == "evaluation step 2 after step 3, microbatch 0, forward"
    slot.count_evaluations(2, False)
    slot.note("forward", 6, 0)
    assert page.sign(0).where() == "step 4, microbatch 0, forward"
