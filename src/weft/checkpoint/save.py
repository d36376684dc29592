"""A save in progress: what the ranks send each other, who writes what, and how a failure of one is everybody's.

main thread      1 stage what this rank holds    2 meet    3 the leader makes the folder
then, or in a    4 every rank writes its file    5 and reports it
thread beside    6 the leader writes the index and makes the save appear    7 all learn how it ended
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.checkpoint.folder import Lock, Writer, explain
from weft.checkpoint.index import Entry, Index, Shard
from weft.checkpoint.meeting import Meeting
from weft.checkpoint.names import SAVING, check_folder, folder_name, shard_name
from weft.checkpoint.shard import Part
from weft.config import Settings
from weft.errors import CheckpointError, PeerError, UsageError, WeftError
from weft.launch.discovery import Place
from weft.profiler.recorder import Recorder
from weft.session.recording import record
from weft.session.step_check import differing
from weft.topology.mesh import Mesh
from weft.watch.monitor import Monitor

log = logging.getLogger("weft")


class Job(Protocol):
    """The parts of a job that a save needs."""

    settings: Settings
    place: Place
    mesh: Mesh
    monitor: Monitor
    steps: int
    store: Any
    saves: Any
    recorder: Recorder | None

    def keep_saves(self, saves: Any) -> None: ...


class Storage(NamedTuple):
    """The functions that write tensors of one framework into a file."""

    stage: Callable[[Mapping[str, Any], bool], dict[str, Any]]
    """Copies tensors to host memory; the flag says that later changes must not be seen."""
    write: Callable[[Path, str, Mapping[str, Any], Callable[[str], None]], tuple[Shard, dict[str, Entry]]]
    """Writes staged tensors into a file of a folder; gives the shard, and its entries of the index."""


@dataclass
class SaveReport:
    """The size and times of a save on this rank: ``blocked_s`` is how long training stood still for it."""

    folder: Path
    written_bytes: int
    blocked_s: float
    total_s: float


class PendingSave:
    """A save that goes on beside the training, in a thread of its own."""

    def __init__(self, work: Callable[[], SaveReport]) -> None:
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="weft-save", daemon=True)

    def start(self) -> PendingSave:
        self._thread.start()
        return self

    def _run(self, work: Callable[[], SaveReport]) -> None:
        try:
            self._report = work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """True if the save has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> SaveReport:
        """The report of the save, once it has ended; the error if the save failed. The error is raised once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._report is None:
            raise CheckpointError("the save failed, as was said before")
        return self._report


class Saves:
    """The saves of this process: at most one at a time."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = job.store.clone() if job.place.world_size > 1 else job.store
        self.locks: dict[Path, Lock] = {}
        self.pending: PendingSave | None = None
        self._met: tuple[int, int] = (-1, 0)

    @classmethod
    def of(cls, job: Job) -> Saves:
        """Those of a job; made when they are asked for first."""
        if job.saves is None:
            job.keep_saves(cls(job))
        saves: Saves = job.saves
        return saves

    def finish(self) -> SaveReport | None:
        """The report of the save that goes on, once it has ended; None if there is none. An error of the save is
        raised.
        """
        pending, self.pending = self.pending, None
        return None if pending is None else pending.wait()

    def close(self) -> None:
        """At the end of the job."""
        for lock in self.locks.values():
            lock.close()

    def meeting(self, what: str, everybody: bool = False) -> Meeting:
        """A meeting of the ranks for a call. ``everybody``: copies of the pipeline have to come as well."""
        job, rank, world = self.job, self.job.place.rank, self.job.place.world_size
        step, count = self._met
        self._met = (job.steps, count + 1 if step == job.steps else 0)
        required = job.mesh.group("mp", 0)
        others = tuple(rank for rank in range(world) if rank not in required)
        return Meeting(
            self.store, f"{self._met[0]}.{self._met[1]}", rank,
            (*required, *others) if everybody else required, () if everybody else others,
            job.steps, job.monitor.signs, what, job.settings.wait_timeout, everybody and job.mesh.rdp > 1,
        )  # fmt: skip


@dataclass
class Request:
    """One call of ``save_checkpoint``.

    ``reached``: called with each phase; for tests. ``everybody``: copies of the pipeline have something to save
    too. ``settings``: what all ranks must have alike, as JSON.
    """

    root: Path
    tag: str
    keep: int | None
    background: bool
    reached: Callable[[str], None]
    everybody: bool = False
    settings: str = "{}"

    @property
    def what(self) -> str:
        return f"save_checkpoint(tag={self.tag!r})"

    def arguments(self, call: str) -> dict[str, str]:
        """The call and those of its arguments that must be the same on every rank."""
        return {"call": call, "path": str(self.root.absolute()), "tag": self.tag, "settings": self.settings}


def meet(meeting: Meeting, arguments: Mapping[str, Any]) -> list[int]:
    """The ranks that came, all with the same call; else :class:`UsageError` on all of them."""
    came = {rank: json.loads(text) for rank, text in meeting.arrive(json.dumps(arguments)).items()}
    if meeting.leads:
        faults = differences(came)
        begin: dict[str, Any] = {"error": "; ".join(faults)} if faults else {}
        meeting.begin({**begin, "ranks": meeting.came})
    else:
        begin = came[meeting.required[0]]
    if "error" in begin:
        meeting.part()
        raise UsageError(begin["error"])
    return list(begin["ranks"]) if not meeting.leads else meeting.came


def differences(came: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Where the calls of the ranks that came differ and must not."""
    faults = []
    for key in ("call", "path", "tag"):
        values = {rank: arguments.get(key, "") for rank, arguments in sorted(came.items())}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{value!r} on rank {rank}" for rank, value in values.items())
            faults.append(f"the {key} must be the same on every rank, it is {shown}")
            if key == "call":
                return faults  # different calls take different arguments
    fault = differing({rank: json.loads(each.get("settings", "{}")) for rank, each in sorted(came.items())})
    return [*faults, fault] if fault else faults


def run(
    job: Job, request: Request, make: Callable[[], Part], storage: Storage
) -> SaveReport | PendingSave | None:
    """Save together with the other ranks; what the save took, or the save that goes on.

    ``make()`` gives this rank's part. A rank whose pipeline is a copy gets None if the others had begun without it.
    """
    with record(job, "checkpoint"):
        return _run(job, request, make, storage)


def _run(
    job: Job, request: Request, make: Callable[[], Part], storage: Storage
) -> SaveReport | PendingSave | None:
    saves = Saves.of(job)
    saves.finish()
    began = time.monotonic()
    job.monitor.note("checkpoint", job.steps)
    try:
        request.reached("stage")
        meeting = saves.meeting(request.what, request.everybody)
        part, tensors, fault = _prepare(request, make, storage)
        writer, ranks, folder = _begin(meeting, request, saves, fault)
        check_folder(folder, Path(request.root), f"{SAVING}{request.tag}-")
    finally:
        job.monitor.note("", job.steps)
    if job.place.rank not in ranks:
        meeting.part(ranks)
        log.info("%s: this rank came late, so its random states are not saved", request.what)
        return None
    blocked_s = time.monotonic() - began

    def work() -> SaveReport:
        content, size = _write(request, part, storage, tensors, folder, meeting.rank)
        final = _appear(meeting, request, content, writer, ranks)
        if writer is not None:
            job.monitor.course.saves += 1
        check_folder(final, Path(request.root), folder_name(request.tag))
        total_s = time.monotonic() - began
        report = SaveReport(final, size, blocked_s if request.background else total_s, total_s)
        log.info("%s: %.1f MiB in %.2f s, of which training stood still %.2f s",
                 request.what, size / 2**20, report.total_s, report.blocked_s)  # fmt: skip
        return report

    if request.background:
        saves.pending = PendingSave(work).start()
        return saves.pending
    job.monitor.note("checkpoint", job.steps)
    try:
        return work()
    finally:
        job.monitor.note("", job.steps)


def _prepare(
    request: Request, make: Callable[[], Part], storage: Storage
) -> tuple[Part, dict[str, Any], str]:
    """This rank's part, its tensors in host memory, and an error of weft's, for the others to hear of."""
    try:
        part = make()
        return part, storage.stage(part.tensors, request.background), ""
    except Exception as error:
        if not isinstance(error, WeftError):
            raise
        return Part(), {}, str(error)


def _begin(
    meeting: Meeting, request: Request, saves: Saves, fault: str
) -> tuple[Writer | None, list[int], Path]:
    """The leader makes the folder and sends the ranks: its writer, if this is the leader, the ranks and the folder."""
    here = {**request.arguments("save_checkpoint"), "fault": fault}
    came = {rank: json.loads(text) for rank, text in meeting.arrive(json.dumps(here)).items()}
    if not meeting.leads:
        begin = came[meeting.required[0]]
        if "error" in begin:
            meeting.part()
            raise UsageError(begin["error"])
        return None, begin["ranks"], Path(request.root) / begin.get("folder", "")
    faults = [f"rank {rank}: {each['fault']}" for rank, each in came.items() if each.get("fault")]
    faults += differences(came)
    writer = Writer(request.root, request.tag, request.keep, request.reached)
    error: type[WeftError] = UsageError
    if not faults:
        try:
            writer.begin(saves.locks)
        except (OSError, CheckpointError) as cause:
            error = CheckpointError
            faults = [f"{request.tag} was not saved: {explain(cause, request.root)}"]
    if faults:
        meeting.begin({"error": "; ".join(faults)})
        meeting.part()
        raise error("; ".join(faults))
    meeting.begin({"folder": writer.name, "ranks": sorted(came)})
    return writer, sorted(came), writer.folder


def _write(
    request: Request, part: Part, storage: Storage, tensors: dict[str, Any], folder: Path, rank: int
) -> tuple[dict[str, Any], int]:
    """Write this rank's file; what the rank reports, and how many bytes of tensors are in the file."""
    try:
        shard, entries = storage.write(folder, shard_name(rank), tensors, request.reached)
        request.reached("report")
        content = {
            "shard": asdict(shard),
            "tensors": {path: asdict(entry) for path, entry in entries.items()},
            "content": part.content,
        }
        return content, sum(entry.size for entry in entries.values())
    except Exception as error:  # a full disk has several types
        return {"error": explain(error, request.root)}, 0


def _appear(
    meeting: Meeting, request: Request, content: Mapping[str, Any], writer: Writer | None, ranks: list[int]
) -> Path:
    """Report what this rank has written; the folder of the save, once the leader has made it appear."""
    meeting.report(json.dumps(content))
    if writer is None:
        ended = meeting.ended()
    else:
        ended = _conclude(meeting, request, writer, ranks)
        meeting.end(ended)
    meeting.part()
    if "error" in ended:
        by = ended["by"]
        raise CheckpointError(ended["error"]) from (
            None if by == meeting.rank else PeerError(by, ended["error"])
        )
    return Path(ended["folder"])


def _conclude(meeting: Meeting, request: Request, writer: Writer, ranks: list[int]) -> dict[str, Any]:
    """Write the index and make the save appear, as the leader, when all have written; how it ended, and by whom."""
    by = meeting.rank
    try:
        request.reached("barrier")
        reports = {rank: json.loads(text) for rank, text in meeting.reports(ranks).items()}
        faults = [f"rank {rank}: {each['error']}" for rank, each in reports.items() if "error" in each]
        by = next((rank for rank, each in reports.items() if "error" in each), by)
        if not faults:
            index = assemble(request.tag, writer.number, reports)
            faults = _find_unseen(writer.folder, index)
        if not faults:
            return {"folder": str(writer.commit(index))}
    except Exception as error:
        faults = [explain(error, request.root)]
    writer.abandon()
    return {
        "error": f"{request.tag} was not saved: {'; '.join(faults)}. Earlier checkpoints in {request.root} are as "
        "they were, and training can go on",
        "by": by,
    }


def _find_unseen(folder: Path, index: Index) -> list[str]:
    """Files that their ranks have written and this rank does not see."""
    return [
        f"{folder / name}, which its rank wrote, is not seen by rank 0: save to a disk that all hosts share"
        for name, shard in index.shards.items()
        if not (folder / name).exists() or (folder / name).stat().st_size != shard.size
    ]


def assemble(tag: str, number: int, reports: Mapping[int, Any]) -> Index:
    """The index of a save from what its ranks reported."""
    shards: dict[str, Shard] = {}
    tensors: dict[str, Entry] = {}
    content: dict[str, Any] = {"extra": {}, "optimizer_values": {}, "ranks": {}}
    for rank, report in reports.items():
        shards[shard_name(rank)] = Shard(**report["shard"])
        tensors |= {
            path: Entry(**{**entry, "shape": tuple(entry["shape"])})
            for path, entry in report["tensors"].items()
        }
        for section, value in report["content"].items():
            if section == "rank":
                content["ranks"][str(rank)] = value
            elif section == "extra" or section.endswith("_values"):
                content[section] = content.get(section, {}) | value
            else:
                content[section] = value
    return Index(tag, number, shards, tensors, content)
