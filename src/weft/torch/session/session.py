"""What a process knows of its job after ``init``: one session, found by every function of the interface."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.config import Settings
from weft.errors import UsageError
from weft.launch.discovery import Place
from weft.profiler.recorder import Recorder
from weft.runtime.allocator import Growth
from weft.runtime.executor import Executor
from weft.runtime.huge_pages import HugePages
from weft.runtime.microbatch import Microbatch, present
from weft.topology.mesh import Mesh
from weft.torch.session.groups import default_takes_host_tensors, rings_of
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import Streams
from weft.transport.torch_dist import TorchChannel
from weft.watch.monitor import Monitor
from weft.watch.progress import Progress

# Who sees all ranks names the one that holds the others up; a rank that only waits speaks this much later.
JUDGE_S = 5.0


@dataclass
class Session:
    """This process's place in the job. ``groups``: ``torch.distributed`` groups by the ranks in them; ``drawing``: the
    microbatch whose random states are the process's now; ``nccl``: ranks have GPUs of their own, and NCCL is there;
    ``asked``: the script has asked whether it is traced; ``compared``: the models
    that are, for ``weft verify``; ``unproved``: why steps are not compared with one process;
    ``left``: what the last one that was compared has left in the modules of other ranks."""

    settings: Settings
    place: Place
    mesh: Mesh
    device: torch.device
    groups: dict[tuple[int, ...], Any]
    streams: Streams
    monitor: Monitor
    pipeline: Pipeline | None = None
    executor: Executor | None = None
    recorder: Recorder | None = None
    forward: tuple[int, float] | None = None
    growth: Growth = field(default_factory=Growth)
    huge_pages: HugePages = field(default_factory=HugePages)
    known_models: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    steps: int = 0
    evaluations: int = 0
    tracing: bool = False
    asked: bool = False
    unproved: str = ""
    compared: Any = ()
    left: Any = None
    first_inputs: bool = False
    seed: int = 0
    drawing: Microbatch | None = None
    chosen: Any = None
    watch: Any = None
    replicas: TorchChannel | None = None
    numbered: int = 0
    changes: list[str] = field(default_factory=list)
    broken: str = ""
    store: Any = None
    saves: Any = None
    nccl: bool = False
    waits: list[str] = field(default_factory=list)
    progress: Progress | None = None
    values: Any = None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """What this rank does outside of microbatches, for reports of ranks that fail or wait."""
        self.check_outside(what)
        self.waits.append(what)
        self.monitor.note("collective", self.steps, None, what)
        try:
            yield
        finally:
            self.waits.pop()
            outer = self.waits[-1] if self.waits else None
            self.monitor.note("collective" if outer else "", self.steps, None, outer)

    def count_step(self, evaluates: bool) -> None:
        """One more step begins; people count those apart that only evaluate."""
        self.steps += 1
        self.evaluations += evaluates
        self.monitor.count_evaluations(self.evaluations, evaluates)

    @property
    def timeout(self) -> timedelta:
        """How long a collective waits for the other ranks."""
        return timeout_of(self.settings)

    @property
    def in_step(self) -> bool:
        """Whether a microbatch of a split model runs here, or the trace of one."""
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

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def models(self) -> list[Any]:
        """The models that exist, in the order of their making: the same on every rank."""
        return [model for _, model in sorted(self.known_models.items())]

    def group(self, axis: str) -> Any:
        """The ``torch.distributed`` group of this rank along ``axis``; ``None`` for a single process."""
        ranks = self.peers(axis)
        if self.place.world_size == 1:
            return None
        if axis == "world" and default_takes_host_tensors():
            return dist.group.WORLD
        if ranks not in self.groups:  # this rank alone, so nobody else needs to take part
            self.groups[ranks] = dist.new_group(ranks, self.timeout, "gloo", use_local_synchronization=True)
        return self.groups[ranks]

    def connect_replicas(self) -> None:
        """A channel between the ranks with the same part of the model, beside the pipeline's; every rank calls this."""
        if self.pipeline is None or self.replicas is not None or self.mesh.rdp == 1:
            return
        with self.doing("the channel between replicas"):
            made = {ranks: dist.new_group(ranks, self.timeout, "gloo") for ranks in self.mesh.groups("rdp")}
            group = made[self.peers("rdp")]
            rings = rings_of(group, self.device)
        self.replicas = TorchChannel(group, self.device, mailbox=self.pipeline.channel.mailbox, rings=rings)

    def position(self, axis: str) -> int:
        return self.mesh.position(axis, self.place.rank)

    def peers(self, axis: str) -> tuple[int, ...]:
        return self.mesh.group(axis, self.place.rank)


def timeout_of(settings: Settings) -> timedelta:
    """How long a collective waits: longer than the judge, who knows whom to blame."""
    return timedelta(seconds=settings.wait_timeout + JUDGE_S)
