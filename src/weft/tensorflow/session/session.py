"""The session of a TensorFlow process: groups and models, beside what every framework's session knows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.errors import PeerError, UsageError
from weft.session import current
from weft.session import session as base
from weft.session.collectives import Alone, BytesPort
from weft.session.session import Closable
from weft.transport.channel import Channel
from weft.transport.groups import GroupPort, default_takes_host_tensors


@dataclass(kw_only=True)
class Session(base.Session):
    """This process's place in the job, for TensorFlow.

    Attributes:
        groups: ``torch.distributed`` groups by the ranks in them.
        channel: Between the ranks of the pipeline; None without one.
        compiled: How many steps were traced.
        failure: The error that ended the step, where it was raised inside of a graph.
        after_partition: What the script wants to be called when a model has been split.
        kept: What rooms have opened for this job, by names of their own; closed at its end.
        saves: The saves of this process, once there was one.
    """

    groups: dict[tuple[int, ...], Any]
    channel: Channel | None = None
    compiled: int = 0
    failure: BaseException | None = None
    after_partition: list[Callable[[], Any]] = field(default_factory=list)
    kept: dict[Hashable, Closable] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where messages arrive."""
        return torch.device("cpu")

    saves: Closable | None = None

    @property
    def channels(self) -> list[Channel]:
        """All channels of this rank."""
        return [self.channel] if self.channel is not None else []

    def keep_saves(self, saves: Closable) -> None:
        """Close these saves at the end of the job."""
        self.saves = saves

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
        """Whatever fails inside is told to the other ranks: inside of a graph it becomes an error of TensorFlow's."""
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
