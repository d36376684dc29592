"""The session of a TensorFlow process: groups and models, beside what every framework's session knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.errors import PeerError, UsageError
from weft.session import current
from weft.session import session as base
from weft.session.collectives import Alone, BytesPort
from weft.session.state import Closable
from weft.tensorflow import private
from weft.transport.channel import Channel
from weft.transport.groups import GroupPort, default_takes_host_tensors


@dataclass(kw_only=True)
class Session(base.Session):
    """This process's place in the job, for TensorFlow.

    Attributes:
        channel: Between the ranks of the pipeline; None without one.
        compiled: How many steps were traced.
        failure: The error that ended the step, where it was raised inside of a graph.
        after_partition: What the script wants to be called when a model has been split.
        kept: What rooms have opened for this job, by names of their own; closed at its end.
    """

    channel: Channel | None = None
    compiled: int = 0
    failure: BaseException | None = None
    after_partition: list[Callable[[], Any]] = field(default_factory=list)
    kept: dict[Hashable, Closable] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where messages arrive."""
        return torch.device("cpu")

    @property
    def channels(self) -> list[Channel]:
        """All channels of this rank."""
        return [self.channel] if self.channel is not None else []

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Remember an error that is raised inside: TensorFlow may make another one of it."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise

    def number_step(self) -> int:
        """A number for a step that was traced, the same on every rank."""
        self.compiled += 1
        return self.compiled

    def group(self, axis: str) -> Any:
        """The ``torch.distributed`` group of this rank along ``axis``; None for a single process."""
        ranks = self.peers(axis)
        if self.place.world_size == 1:
            return None
        if axis == "world" and default_takes_host_tensors():
            return dist.group.WORLD
        return self.groups.get(ranks)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails inside is sent to the other ranks: inside of a graph it becomes an error of TensorFlow's."""
        try:
            yield
        except BaseException as error:
            self.failure = self.failure or error
            self.break_off(error)
            if self.channel is not None and not isinstance(error, PeerError):
                self.channel.abort(self.broken)
            raise

    def close(self) -> None:
        """Close what was opened, unless something failed: then it may be in flight for ever."""
        for each in self.kept.values() if not self.broken else ():
            each.close()
        self.kept.clear()

    def port(self, axis: str = "world") -> BytesPort:
        """Texts to and from the ranks along an axis."""
        group = self.group(axis)
        return Alone() if group is None else GroupPort(group)


def session() -> Session:
    """The present session.

    Raises:
        UsageError: There is none, or it is that of another framework.
    """
    found = current.session()
    if not isinstance(found, Session):
        raise UsageError(
            "this process was initialised by weft.torch: use that one alone, or weft.tensorflow alone"
        )
    return found


def present() -> Session | None:
    """The present session, if there is one."""
    return cast("Session | None", current.present())


def free_others(models: Sequence[Any]) -> None:
    """Give back the memory of all variables of ``models`` that another partition owns.

    Their handles, and with these their keys, are others afterwards; the models know. A variable that no step has used
    yet is of no partition, and keeps its value on every rank.
    """
    own = session().position("pp")
    for model in models:
        for variable in model.all_variables():
            owner = model.owner_of(variable)
            if owner is None or owner == own or not (is_here(variable) or private.waits(variable)):
                continue
            former = private.key_of(private.handle_of(variable))
            private.free(variable, f"{name_of(variable)}, a variable of partition {owner}")
            for each in models:
                each.follow(former, private.key_of(private.handle_of(variable)))


def is_here(variable: Any) -> bool:
    """True if a variable has a value on this rank."""
    return not private.uninitialised(private.underlying(variable))


def name_of(variable: Any) -> str:
    """The name of a variable of Keras (its path) or of TensorFlow."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def observe(session: base.Session) -> list[Callable[[], None]]:
    """From now on these have spans; what is returned ends that.

    Inside of a ``tf.function``, as Keras's ``fit`` has it, Python is called before and after the operations.
    """
    return [
        private.watch_iterators(*_calls(session, "data")),
        private.watch_updates(*_calls(session, "optimizer")),
    ]


def _calls(session: base.Session, kind: str) -> tuple[Callable[[], int], Callable[[], int]]:
    """The functions to call before and after something that becomes a span."""
    began: list[float] = []

    def before() -> int:
        began[:] = [time.perf_counter()]
        return 0

    def after() -> int:
        if began and session.recorder is not None:
            session.recorder.add(kind, session.steps or -1, -1, began.pop(), time.perf_counter())
        return 0

    return before, after
