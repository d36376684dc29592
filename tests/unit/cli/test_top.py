"""`weft top`: what a line says, and that it begins and ends as it should."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.launching import SOURCE, started
from tests.recordings import Recorded
from weft.analysis.run import Facts, Run
from weft.cli.live.top import Row, plain, rows, worst
from weft.cli.main import main
from weft.profiler.clock import Clock
from weft.profiler.facts import write_facts
from weft.profiler.live.following import Judged
from weft.profiler.recorder import Recorder
from weft.profiler.steps import END, line_of
from weft.rules.rule import Rule, Status

MADE = Recorded(partitions=2, microbatches=4, steps=12, slow={0: 2.0}, host_s=1.0)


@dataclass(frozen=True)
class Slow(Rule):
    """A rank is slow."""

    def evaluate(self, analysis):
        return self.warning("rank 0 is\x1b[2J slow", ranks=(0,))


@dataclass(frozen=True)
class Lost(Slow):
    """All is lost."""

    def evaluate(self, analysis):
        return self.critical("all is lost")


def write(folder: Path, run: Run) -> None:
    for rank in run.ranks:
        file = Recorder.open(folder, rank, len(run.ranks))
        for span in run.timeline.of_rank(rank):
            file.add(
                span.kind, span.step, span.microbatch, span.start_s, span.end_s, span.peer, stage=span.stage
            )
        file.close()
        lines = "".join(line_of(step) + "\n" for step in run.steps[rank])
        (folder / f"rank{rank}.steps.jsonl").write_text(lines)


def end(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        write_facts(folder, Facts(rank, ranks), Clock.here())
        with (folder / f"rank{rank}.steps.jsonl").open("a") as file:
            file.write(END + "\n")


def test_what_a_line_says():
    """Of 12 steps the last 20 but one: 11. Rank 0 takes 6 s for a microbatch, rank 1 takes 3 s, and the step 27 s."""
    run = MADE.run()
    first, second = rows(run, [])
    period = run.steps[0][1].start_s - run.steps[0][0].start_s
    work = run.steps[1][0].work_s
    assert work == 4 * 3.0
    assert (first.rank, first.step, first.memory) == ("0", "12", "100 MiB of 1 GiB")
    assert first.step_time == second.step_time == f"{period:.3g} s"
    assert first.rate == f"{32 / period:,.0f} samples/s"
    assert first.idle == f"{1 - 2 * work / period:.0%}" and second.idle == f"{1 - work / period:.0%}"
    assert second.waits_for.startswith("rank 0, ")


def test_tokens_and_evaluation_steps():
    values = {"values": {"tokens": 1000.0}, "evaluates": True}
    (first, _) = rows(replace(MADE, step_values=lambda rank, step: values).run())
    assert first.rate.endswith(" tokens/s") and first.step == "12 (evaluates)"


def test_a_rank_that_has_not_ended_a_step():
    run = MADE.run()
    assert rows(replace(run, steps={0: run.steps[0]}))[1] == Row("1", "-", "", "", "", "", "", "")


def test_one_step_is_shown_too():
    (first, _) = rows(replace(MADE, steps=1).run())
    assert first.step == "1" and first.step_time and first.idle


def test_the_worst_finding_stands_in_the_lines_of_its_ranks():
    now = [0.0]
    judged = Judged([Slow(), Lost()], clock=lambda: now[0])
    run = MADE.run()
    found = judged.of(run)
    assert [each.rule for each in found] == ["Lost", "Slow"] and worst(
        found
    ) == "Lost (critical): all is lost"
    assert [row.finding for row in rows(run, found[1:])] == ["Slow", ""]
    assert worst(found[1:]) == "Slow (warning): rank 0 is\\x1b[2J slow" and worst([]) == ""


def test_rules_are_asked_every_five_seconds():
    now, asked = [0.0], []

    @dataclass(frozen=True)
    class Counted(Slow):
        """Counts."""

        def evaluate(self, analysis):
            asked.append(now[0])
            return self.passed()

    judged = Judged([Counted()], clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 4.9, 5.0, 9.0, 11.0):
        judged.of(MADE.run())
    assert asked == [0.0, 5.0, 11.0]


def test_causes_stand_before_consequences():
    @dataclass(frozen=True)
    class Cause(Rule):
        """It is slow."""

        explains = ("Consequence",)

        def evaluate(self, analysis):
            return self.warning("x")

    @dataclass(frozen=True)
    class Consequence(Rule):
        """Others wait."""

        def evaluate(self, analysis):
            return self.critical("y")

    @dataclass(frozen=True)
    class Other(Consequence):
        """Besides."""

        def evaluate(self, analysis):
            return self.info("z")

    found = Judged([Other(), Consequence(), Cause()]).of(MADE.run())
    assert [(each.rule, each.explained_by) for each in found] == [
        ("Cause", ""), ("Other", ""), ("Consequence", "Cause"),
    ]  # fmt: skip
    assert found[2].status is Status.WARNING


def test_columns_that_are_empty_are_left_out():
    text = plain(
        [Row("0", "12", "1 s", "", "20%", "", "", ""), Row("1", "11", "1.5 s", "", "5%", "", "", "")]
    )
    assert text.split("\n") == [
        "rank  step  step time  idle", "----  ----  ---------  ----", "0     12    1 s        20%",
        "1     11    1.5 s      5%",
    ]  # fmt: skip


def test_once(tmp_path, capsys):
    write(tmp_path, MADE.run())
    assert main(["top", str(tmp_path), "--once"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].split()[:3] == ["rank", "step", "step"] and lines[2].startswith("0     12")
    assert lines[4].startswith(f"{lines[2].split()[-1]} (")


def test_it_ends_when_the_run_is_complete(tmp_path, capsys):
    write(tmp_path, MADE.run())
    end(tmp_path, 2)
    assert main(["top", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\n\nthe run is complete\n")


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["{folder}/none", "--once"], "holds no recording: name the folder that weft run --report writes"),
        (["{folder}", "--once"], "holds no recording"),
        (["{folder}/file"], "is a file: name the folder"),
    ],
)
def test_folders_that_are_none(tmp_path, capsys, arguments, told):
    (tmp_path / "file").write_text("")
    assert main(["top", *(each.format(folder=tmp_path) for each in arguments)]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_is_not_there_yet_is_told(tmp_path, monkeypatch, capsys):
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    assert main(["top", str(tmp_path / "soon")]) == 0
    assert capsys.readouterr().err == f"weft top: {tmp_path}/soon is not there yet: waiting for a job\n"


@pytest.mark.parametrize("every", ["0", "-1", "nan", "soon", "1e9"])
def test_times_that_are_none(capsys, every):
    with pytest.raises(SystemExit):
        main(["top", ".", "--every", every])
    assert "write seconds from 0.05 to 3600" in capsys.readouterr().err


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft", "top", *arguments]


def test_on_a_terminal_a_table_is_drawn(tmp_path):
    pytest.importorskip("rich")
    write(tmp_path, MADE.run())
    end(tmp_path, 2)
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command(str(tmp_path)), stdout=theirs, stderr=subprocess.PIPE, env=environ)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 1 << 16):
            seen += part
    except OSError:  # the other end is closed
        pass
    _, told = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, told
    assert b"waits for" in seen and b"the run is complete" in seen and b"\x1b[" in seen


JOB = """
import sys, time
import torch
from torch import nn
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 4, "verify": "off"})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]))

@weft.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

while True:
    train_step(model, torch.randn(8, 32))
    time.sleep(0.05)
"""


def test_a_job_that_runs_and_ctrl_c(tmp_path):
    folder = tmp_path / "out"
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with started(2, JOB, options=["--quiet", "--record", str(folder)]):
        top = subprocess.Popen(
            command(str(folder), "--every", "0.2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environ,
        )  # fmt: skip
        assert top.stdout is not None
        steps: set[str] = set()
        deadline = time.monotonic() + 150
        while len(steps) < 5 and time.monotonic() < deadline:
            line = top.stdout.readline()
            if line.startswith("1 "):
                steps.add(line.split()[1])
        top.send_signal(signal.SIGINT)
        out, told = top.communicate(timeout=60)
    assert len(steps - {"-"}) >= 4 and all(step.isdigit() for step in steps - {"-"})
    assert top.returncode == 0 and told in ("", f"weft top: {folder} is not there yet: waiting for a job\n")
