"""A save in progress: what the ranks tell each other, who writes what, and how a failure of one is everybody's.

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
from typing import Any

from weft.checkpoint.folder import Lock, Writer, explain
from weft.checkpoint.index import Entry, Index, Shard
from weft.checkpoint.meeting import Meeting
from weft.checkpoint.names import SAVING, check_told, folder_name, shard_name
from weft.errors import CheckpointError, UsageError, WeftError
from weft.torch.checkpoint.named_state import Part
from weft.torch.checkpoint.tensor_files import staged, write_shard
from weft.torch.session.session import Session

log = logging.getLogger("weft")


@dataclass
class SaveReport:
    """What a save took on this rank: ``blocked_s`` is how long training stood still for it."""

    folder: Path
    written_bytes: int
    blocked_s: float
    total_s: float


class PendingSave:
    """A save that goes on beside the training."""

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
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> SaveReport:
        """What the save took; the error if it failed. It is raised once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._report is None:
            raise CheckpointError("the save failed, as was said before")
        return self._report


class Saves:
    """The saves of this process: at most one at a time."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.store = session.store.clone() if session.place.world_size > 1 else session.store
        self.locks: dict[Path, Lock] = {}
        self.pending: PendingSave | None = None
        self._met: tuple[int, int] = (-1, 0)

    @classmethod
    def of(cls, session: Session) -> Saves:
        if session.saves is None:
            session.keep_saves(cls(session))
        assert isinstance(session.saves, cls)
        return session.saves

    def finish(self) -> SaveReport | None:
        """Wait for the save that goes on, if there is one; its error is raised here."""
        pending, self.pending = self.pending, None
        return None if pending is None else pending.wait()

    def close(self) -> None:
        """At the end of the job."""
        for lock in self.locks.values():
            lock.close()

    def meeting(self, what: str, everybody: bool = False) -> Meeting:
        session = self.session
        step, count = self._met
        self._met = (session.steps, count + 1 if step == session.steps else 0)
        required = session.mesh.group("mp", 0)
        others = tuple(rank for rank in range(session.place.world_size) if rank not in required)
        return Meeting(
            self.store, f"{self._met[0]}.{self._met[1]}", session.rank,
            (*required, *others) if everybody else required, () if everybody else others,
            session.steps, session.monitor.signs, what, session.settings.wait_timeout,
            everybody and session.mesh.rdp > 1,
        )  # fmt: skip


@dataclass
class Request:
    """One call of ``save_checkpoint``. ``reached``: told of each phase; for tests of faults. ``everybody``: copies of
    the pipeline have something to save too."""

    root: Path
    tag: str
    keep: int | None
    background: bool
    reached: Callable[[str], None]
    everybody: bool = False

    @property
    def what(self) -> str:
        return f"save_checkpoint(tag={self.tag!r})"

    def said(self, call: str) -> dict[str, str]:
        """What must be the same on every rank."""
        return {"call": call, "path": str(self.root.absolute()), "tag": self.tag}


def meet(meeting: Meeting, said: Mapping[str, Any]) -> list[int]:
    """The ranks that came, all with the same call; else :class:`UsageError` on all of them."""
    came = {rank: json.loads(text) for rank, text in meeting.arrive(json.dumps(said)).items()}
    if meeting.leads:
        faults = unlike(came)
        begin: dict[str, Any] = {"error": "; ".join(faults)} if faults else {}
        meeting.begin({**begin, "ranks": meeting.came})
    else:
        begin = came[meeting.required[0]]
    if "error" in begin:
        meeting.part()
        raise UsageError(begin["error"])
    return list(begin["ranks"]) if not meeting.leads else meeting.came


def unlike(came: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """In what the calls of the ranks that came differ and must not."""
    faults = []
    for key in ("call", "path", "tag"):
        values = {rank: said.get(key, "") for rank, said in sorted(came.items())}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value!r} on rank {rank}" for rank, value in values.items())
            faults.append(f"the {key} must be the same on every rank, it is {told}")
            if key == "call":
                break  # the calls take other things then
    return faults


def run(session: Session, request: Request, make: Callable[[], Part]) -> SaveReport | PendingSave | None:
    """Save together with the other ranks.

    ``make()`` gives this rank's part. None for a rank whose pipeline is a copy and that came when the others had begun
    without it.
    """
    saves = Saves.of(session)
    saves.finish()
    began = time.monotonic()
    session.monitor.note("checkpoint", session.steps)
    try:
        request.reached("stage")
        meeting = saves.meeting(request.what, request.everybody)
        part, tensors, fault = _prepared(request, make)
        writer, ranks, folder = _begin(meeting, request, saves, fault)
        check_told(folder, Path(request.root), f"{SAVING}{request.tag}-")
    finally:
        session.monitor.note("", session.steps)
    if session.rank not in ranks:
        meeting.part(ranks)
        log.info("%s: this rank came late, so its random states are not saved", request.what)
        return None
    blocked_s = time.monotonic() - began

    def work() -> SaveReport:
        final = _write(meeting, request, part, tensors, folder, writer, ranks)
        check_told(final, Path(request.root), folder_name(request.tag))
        total_s = time.monotonic() - began
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        report = SaveReport(final, size, blocked_s if request.background else total_s, total_s)
        log.info("%s: %.1f MiB in %.2f s, of which training stood still %.2f s",
                 request.what, size / 2**20, report.total_s, report.blocked_s)  # fmt: skip
        return report

    if request.background:
        saves.pending = PendingSave(work).start()
        return saves.pending
    session.monitor.note("checkpoint", session.steps)
    try:
        return work()
    finally:
        session.monitor.note("", session.steps)


def _prepared(request: Request, make: Callable[[], Part]) -> tuple[Part, dict[str, Any], str]:
    """This rank's part in host memory; an error is kept, for the others to hear of."""
    try:
        part = make()
        return part, staged(part.tensors, copy=request.background), ""
    except Exception as error:
        if not isinstance(error, WeftError):
            raise
        return Part(), {}, str(error)


def _begin(
    meeting: Meeting, request: Request, saves: Saves, fault: str
) -> tuple[Writer | None, list[int], Path]:
    here = {**request.said("save_checkpoint"), "fault": fault}
    came = {rank: json.loads(text) for rank, text in meeting.arrive(json.dumps(here)).items()}
    if not meeting.leads:
        begin = came[meeting.required[0]]
        if "error" in begin:
            meeting.part()
            raise UsageError(begin["error"])
        return None, begin["ranks"], Path(request.root) / begin.get("folder", "")
    faults = [f"rank {rank}: {said['fault']}" for rank, said in came.items() if said.get("fault")]
    faults += unlike(came)
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
    meeting: Meeting, request: Request, part: Part, tensors: dict[str, Any], folder: Path,
    writer: Writer | None, ranks: list[int],
) -> Path:  # fmt: skip
    name = shard_name(meeting.rank)
    try:
        shard, entries = write_shard(folder, name, tensors, request.reached)
        request.reached("report")
        content: dict[str, Any] = {
            "shard": asdict(shard),
            "tensors": {path: asdict(entry) for path, entry in entries.items()},
            "content": part.content,
        }
    except Exception as error:  # a full disk has several types
        content = {"error": explain(error, request.root)}
    meeting.report(json.dumps(content))
    if writer is None:
        ended = meeting.ended()
    else:
        ended = _conclude(meeting, request, writer, ranks)
        meeting.end(ended)
    meeting.part()
    if "error" in ended:
        raise CheckpointError(ended["error"])
    return Path(ended["folder"])


def _conclude(meeting: Meeting, request: Request, writer: Writer, ranks: list[int]) -> dict[str, str]:
    """What the leader does when all have written: the index, and the save's appearance."""
    try:
        request.reached("barrier")
        told = {rank: json.loads(text) for rank, text in meeting.reports(ranks).items()}
        faults = [f"rank {rank}: {said['error']}" for rank, said in told.items() if "error" in said]
        if not faults:
            index = assemble(request.tag, writer.number, told)
            faults = _unseen(writer.folder, index)
        if not faults:
            return {"folder": str(writer.commit(index))}
    except Exception as error:
        faults = [explain(error, request.root)]
    writer.abandon()
    return {
        "error": f"{request.tag} was not saved: {'; '.join(faults)}. Earlier checkpoints in {request.root} are as "
        "they were, and training can go on"
    }


def _unseen(folder: Path, index: Index) -> list[str]:
    return [
        f"{folder / name}, which its rank wrote, is not seen by rank 0: save to a disk that all hosts share"
        for name, shard in index.shards.items()
        if not (folder / name).exists() or (folder / name).stat().st_size != shard.size
    ]


def assemble(tag: str, number: int, told: Mapping[int, Any]) -> Index:
    """The index of a save from what its ranks reported."""
    shards: dict[str, Shard] = {}
    tensors: dict[str, Entry] = {}
    content: dict[str, Any] = {"extra": {}, "optimizer_values": {}, "ranks": {}}
    for rank, said in told.items():
        shards[shard_name(rank)] = Shard(**said["shard"])
        tensors |= {
            path: Entry(**{**entry, "shape": tuple(entry["shape"])})
            for path, entry in said["tensors"].items()
        }
        for section, value in said["content"].items():
            if section == "rank":
                content["ranks"][str(rank)] = value
            elif section in ("extra", "optimizer_values"):
                content[section] |= value
            else:
                content[section] = value
    return Index(tag, number, shards, tensors, content)
