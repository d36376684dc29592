"""The status of a job by its folder, for another process, and the job's end. Nothing in the folder is believed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import FormatError, LaunchError
from weft.launch.journal.journal import EVENTS, FAILURE, RUN, attempt_folder, reader
from weft.profiler.clock import clock_offset_s
from weft.terminal_text import visible
from weft.units import format_seconds
from weft.untrusted import (
    LARGEST,
    TEXT_LIMIT_BYTES,
    cut,
    parse_json,
    read_limited,
    shown_path,
    translated,
    whole,
)
from weft.watch.files.blocked_ranks import NOTHING, Standing
from weft.watch.process import began, boot, host_name
from weft.watch.progress_file import NAME as STEP

_LONGEST = 500
_MOST_RANKS = 32
"""At most so many ranks get a line each."""


@dataclass(frozen=True)
class JobStatus:
    """The status of a job, read from its folder.

    Attributes:
        run: The newest start, as in ``run.json``.
        events: What has happened since then, the oldest first.
        failure: The newest failure, if there was one.
        pid: The launcher's process if it runs on this machine, else 0.
        step: How far the newest attempt is, as in ``step.json``; None before the first step, and of scripts without
            steps of weft.
        standing: The files in which ranks of the newest attempt stand, as in ``files.json``.
    """

    folder: Path
    run: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    failure: Mapping[str, Any] | None
    pid: int
    step: Mapping[str, Any] | None = None
    standing: Standing = NOTHING

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None while it runs, or if it left none."""
        code = next(
            (event.get("code") for event in reversed(self.events) if event.get("event") == "ended"), None
        )
        return code if isinstance(code, int) and not self.pid else None

    @property
    def handed_in(self) -> str:
        """The number of the job that another engine has, as it writes it; empty if weft's launcher runs it."""
        found = [event.get("job") for event in self.events if event.get("event") == "handed in"]
        return _text(found[-1]) if found else ""

    @property
    def logs(self) -> int | None:
        """The number of the newest start, by which its folder is called; None before the first one."""
        found = [event.get("logs") for event in self.events if event.get("event") == "attempt"]
        number = whole(str(found[-1]).removeprefix("attempt-")) if found else None
        return number

    @property
    def host(self) -> str:
        """The name of the host where the launcher was started."""
        return _text(_mapping(self.run.get("launcher")).get("host"))

    def lines(self) -> Iterator[str]:
        """All of it, for people."""
        where = shown_path(self.folder)
        if self.pid:
            yield f"{where}: runs, launcher pid {self.pid}"
        elif self.code is not None:
            yield f"{where}: ended, exit code {self.code}"
        elif self.handed_in:
            yield f"{where}: Slurm has it as job {self.handed_in}; squeue -j {self.handed_in} says whether it runs"
        elif self.host not in ("", host_name()):
            yield f"{where}: started on {self.host}; whether it runs can be seen there"
        else:
            yield f"{where}: its launcher is gone and left no exit code: it was killed, or the machine stopped"
        began_s = self.run.get("time")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began_s)) if _is_time(began_s) else "?"
        script, ranks = _text(self.run.get("script")), _text(self.run.get("ranks"))
        yield f"  {script}, {ranks} ranks, engine {_text(self.run.get('engine'))}, started {when}"
        yield from (
            f"  {line}" for line in (*self._attempts(), *self._pace(), *self._ranks(), *self._standing())
        )

    def _attempts(self) -> Iterator[str]:
        since: Any = None
        for event in self.events:
            number = _text(event.get("attempt"))
            if event.get("event") == "attempt":
                since = event.get("time")
                yield f"attempt {number}: logs in {_text(event.get('logs'))}"
            elif event.get("event") == "failed":
                now = event.get("time")
                span = f" after {format_seconds(now - since)}" if _is_time(now) and _is_time(since) else ""
                yield f"attempt {number}: failed{span}: {_text(event.get('headline'))}"
            elif event.get("event") == "stopping":
                yield f"attempt {number}: asked to end by {_text(event.get('signal'))}"

    def _pace(self) -> Iterator[str]:
        """The step, and while the job runs how many there are a minute, and when this one began."""
        if self.step is None:
            return
        rate, since_s = self.step.get("steps_per_minute"), self.step["time"]
        text = f"step {self.step['step']}"
        if isinstance(rate, float):
            text += f", {rate:.4g} steps a minute"
        if self.code is None:
            text += f", which began {format_seconds(max(0.0, now_s() - since_s))} ago"
        yield text

    def _ranks(self) -> Iterator[str]:
        """The ranks of the present attempt; none once the job has ended."""
        at = max(
            (place for place, event in enumerate(self.events) if event.get("event") == "attempt"), default=0
        )
        started: dict[str, Any] = {}
        ended: dict[str, str] = {}
        for event in self.events[at:]:
            if event.get("event") == "started":
                started = dict(_mapping(event.get("ranks")))
            elif event.get("event") == "rank ended":
                ended[_text(event.get("rank"))] = _text(event.get("code"))
        if not self.pid:
            return
        for rank, place in [*started.items()][:_MOST_RANKS]:
            process = _mapping(place)
            how = f"ended, exit code {ended[rank]}" if rank in ended else "runs"
            yield f"rank {_text(rank)}: {how}, pid {_text(process.get('pid'))} on {_text(process.get('host'))}"
        if len(started) > _MOST_RANKS:
            yield f"and {len(started) - _MOST_RANKS} more ranks"

    def _standing(self) -> Iterator[str]:
        """The files in which ranks stand, and who waits for them, while the job runs."""
        ranks = sorted({*self.standing.operations, *self.standing.waiting}) if self.code is None else []
        yield from (f"rank {rank} {self.standing.of(rank, now_s())}" for rank in ranks[:_MOST_RANKS])


def read(folder: Path) -> JobStatus:
    """Reads the status of a job from its folder.

    Raises:
        LaunchError: No job has run with it.
        FormatError: A file in it is damaged.
    """
    if not os.path.lexists(folder / RUN):
        raise LaunchError(
            f'"{shown_path(folder)}" is no folder of a job: name one that weft run --log-dir was given'
        )
    run = _mapping(parse_json(_file(folder / RUN), f'"{shown_path(folder / RUN)}" is not JSON'))
    events: list[Mapping[str, Any]] = []
    with suppress(FileNotFoundError):
        for line in _file(folder / EVENTS, run.get("events_from")).splitlines():
            with suppress(FormatError):  # the last one may not be whole yet
                if isinstance(event := parse_json(line), Mapping):
                    events.append(event)
    failure = None
    if os.path.lexists(folder / FAILURE):
        failure = _mapping(
            parse_json(_file(folder / FAILURE), f'"{shown_path(folder / FAILURE)}" is not JSON')
        )
    status = JobStatus(folder, run, tuple(events), failure, launcher_of(folder, run))
    if status.logs is None:
        return status
    newest = attempt_folder(folder, status.logs)
    return replace(status, step=_step(newest / STEP), standing=Standing.read(newest))


def now_s() -> float:
    """Seconds since 1970, as the journal counts them."""
    return time.perf_counter() + clock_offset_s()


def _step(path: Path) -> Mapping[str, Any] | None:
    with suppress(FormatError, OSError):
        progress = parse_json(_file(path)) if os.path.lexists(path) else None
        if (
            isinstance(progress, Mapping)
            and type(progress.get("step")) is int
            and _is_time(progress.get("time"))
        ):
            return progress
    return None


def launcher_of(folder: Path, run: Mapping[str, Any]) -> int:
    """The process of the launcher, if it runs on this machine and is the one of this folder; else 0.

    A number in a file may have been written by anybody, or may be another process's by now. So the process has to be
    this user's, to have begun when the file says so, and to have the folder's events open.
    """
    launcher = _mapping(run.get("launcher"))
    pid = launcher.get("pid")
    if (
        type(pid) is not int
        or pid < 2
        or launcher.get("boot") != boot()
        or launcher.get("began") != began(pid)
    ):
        return 0
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return 0
        events = os.stat(folder / EVENTS, follow_symlinks=False)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), events):
                    return pid
    except OSError:
        pass
    return 0


def _file(path: Path, start: object = 0) -> str:
    """The text of a file, from a byte on."""
    with translated(f'"{shown_path(path)}" cannot be read'), reader(path) as file:
        file.seek(start if type(start) is int and 0 <= start < LARGEST else 0)
        content = read_limited(file, TEXT_LIMIT_BYTES)
        if len(content) > TEXT_LIMIT_BYTES:
            raise FormatError(
                f'"{shown_path(path)}" has more than {TEXT_LIMIT_BYTES} bytes: is it the right one?'
            )
        return content.decode()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    """Whatever stands there, as it may be shown."""
    return cut(visible(str(value)), _LONGEST) if value is not None else "?"


def _is_time(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < 1e11


SAVE_S = 300.0
"""Seconds in which a job may save and end by itself."""
END_S = 15.0
"""Seconds in which it has to end at once."""
_SECOND_S = 0.2
"""Between two signals that end a job at once."""
_TICK_S = 0.05


def stop(folder: Path, save_s: float = SAVE_S, say: Callable[[str], None] = lambda text: None) -> JobStatus:
    """Ends the job of a folder, and gives what the folder says after that.

    A job that has saves goes on to the end of a step and saves; 0 seconds for that end it at once.

    Raises:
        LaunchError: No job runs with the folder, or not on this machine.
    """
    status = read(folder)
    pid = _launcher(status)
    for number, seconds, text in (
        (signal.SIGTERM, max(save_s, _SECOND_S), "asked to end"),
        (signal.SIGTERM, END_S, "asked to end at once"),
        (signal.SIGKILL, END_S, "killed"),
    ):
        say(f"the job of {shown_path(folder)} is {text} (launcher pid {pid})")
        if launcher_of(status.folder, status.run) == status.pid:  # still the same process
            with suppress(ProcessLookupError):
                os.kill(status.pid, number)
        if _ends(status, seconds):
            return read(folder)
    raise LaunchError(
        f"the launcher (pid {pid}) still runs {format_seconds(END_S)} after SIGKILL: the system holds it back"
    )


def _launcher(status: JobStatus) -> int:
    if status.pid:
        return status.pid
    where = shown_path(status.folder)
    if status.handed_in and status.code is None:
        raise LaunchError(f'Slurm has the job of "{where}": end it with scancel {status.handed_in}')
    if status.host not in ("", "?", host_name()):
        raise LaunchError(f'the job of "{where}" was started on {status.host}: run weft stop there')
    raise LaunchError(f'no job runs with "{where}": there is nothing to end')


def _ends(status: JobStatus, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while launcher_of(status.folder, status.run):
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_S)
    return True
