"""The session of a process: what it knows of its job, and what it does just now."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weft.config import Settings
from weft.errors import UsageError
from weft.launch.discovery import Place
from weft.runtime.executor import Executor
from weft.runtime.microbatch import present
from weft.session.state import Decisions, Recorded, Saves, Views
from weft.session.travel import Travel
from weft.topology.mesh import Mesh
from weft.watch.monitor import Monitor

if TYPE_CHECKING:
    from weft.profiler.recorder import Recorder

JUDGE_S = 5.0
"""A rank that only waits speaks so much later than the one that sees all ranks: that one knows whom to blame."""


@dataclass(kw_only=True)
class Session:
    """This process's place in its job. Whoever wants to change a session asks it, by one of the methods below.

    Attributes:
        settings: The settings of the job.
        place: Which process of the job this is.
        mesh: Which ranks lie on which axes.
        monitor: Gets what this rank does, and knows what the others do.
        store: The key-value store of the job, that of the frontend's own library.
        groups: ``torch.distributed`` groups by the ranks in them.
        executor: Who runs the microbatches; None without a pipeline.
        recorder: This rank's recording, if one is written.
        recorded: Facts for each recording of this process.
        saves: The saves of this process, once there was one.
        views: Where people see the job while it runs.
        decided: What was decided here, as the settings leave it open.
        steps: How many steps have begun.
        evaluations: How many of them had no backward pass.
        tracing: Whether the step only rehearses.
        asked: Whether the script has asked in this rehearsal if it is one.
        broken: Why no further step can run; empty if nothing has failed.
        waits: What this rank does outside of microbatches, the innermost last.
        known_models: The models that exist, by the order of their making.
        travel: What the framework says of objects that go between ranks.
        rehearsal: What `weft rehearse` was asked, and has found; None in a job that trains.
        rejoin: The other replicas, where each is a job of its own (``min_replicas``), else None. The ranks, sizes and
            groups of the session are those of the replica then.
    """

    settings: Settings
    place: Place
    mesh: Mesh
    monitor: Monitor
    store: Any = None
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    executor: Executor | None = None
    recorder: Recorder | None = None
    recorded: Recorded = field(default_factory=Recorded)
    saves: Saves | None = None
    views: Views = field(default_factory=Views)
    decided: Decisions = field(default_factory=Decisions)
    steps: int = 0
    evaluations: int = 0
    tracing: bool = False
    asked: bool = False
    broken: str = ""
    waits: list[str] = field(default_factory=list)
    known_models: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    travel: Travel = Travel()
    rehearsal: Any = None
    rejoin: Any = None

    # --- where this process is ------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self.place.rank

    def position(self, axis: str) -> int:
        """This rank's place along an axis of the mesh."""
        return self.mesh.position(axis, self.place.rank)

    def peers(self, axis: str) -> tuple[int, ...]:
        """The ranks along an axis of the mesh, this one among them."""
        return self.mesh.group(axis, self.place.rank)

    @property
    def timeout(self) -> timedelta:
        """The time that a collective waits for the other ranks."""
        return timeout_of(self.settings)

    # --- models ---------------------------------------------------------------------------------------------

    def add_model(self, model: Any) -> None:
        """Know one more model, as long as it exists."""
        self.known_models[max(self.known_models, default=-1) + 1] = model

    @property
    def models(self) -> list[Any]:
        """The models that exist, in the order of their making: the same on every rank."""
        return [model for _, model in sorted(self.known_models.items())]

    # --- what it does ---------------------------------------------------------------------------------------

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Notes what this rank does outside of microbatches, for reports of ranks that fail or wait."""
        self.check_outside(what)
        self.waits.append(what)
        self.monitor.note("collective", self.steps, None, what)
        try:
            yield
        finally:
            self.waits.pop()
            outer = self.waits[-1] if self.waits else None
            self.monitor.note("collective" if outer else "", self.steps, None, outer)

    @property
    def in_step(self) -> bool:
        """True if a microbatch of a split model runs here, or the trace of one."""
        return self.tracing or present() is not None

    def check_outside(self, what: str) -> None:
        """Refuse ``what`` in a step that is split.

        Raises:
            UsageError: One runs. Its microbatches are in flight together, and ranks come there at different times.
        """
        if self.in_step:
            raise UsageError(
                f"{what} was called inside a weft.step function: call it before or after the step"
            )

    def need_all_replicas(self, what: str) -> None:
        """Refuse ``what`` in a job whose replicas may be lost.

        Raises:
            UsageError: They may, so each is a job of its own, and knows of the others at the end of a step only.
        """
        if self.rejoin is not None:
            raise UsageError(
                f"{what} needs all replicas, and with min_replicas some may be lost: leave one of the two out"
            )

    def check_whole(self) -> None:
        """Refuse a further step after one that failed.

        Raises:
            UsageError: One has failed. The ranks may have come to different points of it.
        """
        if self.broken:
            raise UsageError(f"the job cannot go on after a failed step: {self.broken}")

    # --- what changes ---------------------------------------------------------------------------------------

    def count_step(self, evaluates: bool) -> None:
        """One more step begins. Steps that only evaluate are counted apart, too: people leave them out."""
        self.steps += 1
        self.evaluations += evaluates
        self.monitor.count_evaluations(self.evaluations, evaluates)
        if self.recorder is not None:
            self.recorder.begin_step(self.steps, evaluates)

    def use_settings(self, settings: Settings) -> None:
        """Go on with other settings for the same mesh; schedules are chosen anew."""
        old, self.settings = self.settings, settings
        self.decided.follow_settings(old, settings)
        if self.executor is not None:
            self.executor.wait_timeout_s = wait_timeout_s(settings)

    def decide(self, **decided: Any) -> None:
        """Put what was decided in the place of settings that were left open; all else stays."""
        self.settings = replace(self.settings, **decided)
        self.decided.names |= decided.keys()

    def decide_number(self, microbatches: int, reasons: str) -> None:
        """Cut mini-batches into so many microbatches from now on, for these reasons."""
        self.decide(microbatches=microbatches)
        self.decided.number_reasons = reasons

    def keep_saves(self, saves: Saves) -> None:
        """Close these saves at the end of the job."""
        self.saves = saves

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, the step only rehearses: it is measured, or compared with one process."""
        self.tracing, self.asked = True, False
        try:
            yield
        finally:
            self.tracing = False

    def break_off(self, error: BaseException) -> None:
        """A step has failed: no further one can run."""
        self.broken = f"{type(error).__name__}: {error}"
        self.monitor.locate(error)


def wait_timeout_s(settings: Settings) -> float:
    """The seconds that a rank waits: longer than the judge, who knows whom to blame."""
    return settings.wait_timeout + JUDGE_S


def timeout_of(settings: Settings) -> timedelta:
    """The time that a collective waits for the other ranks."""
    return timedelta(seconds=wait_timeout_s(settings))
