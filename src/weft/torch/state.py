"""What a process knows of its job after ``init``: one session, found by every function of the interface."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.config import Settings, resolve
from weft.errors import ConfigError, UsageError
from weft.launch import rendezvous
from weft.launch.discovery import Place, discover
from weft.launch.startup import agree
from weft.profiler.recorder import Recorder
from weft.reduce.exchange import gather_rows
from weft.runtime.allocator import Growth, keep_memory
from weft.runtime.executor import Executor, Hooks
from weft.runtime.huge_pages import HugePages
from weft.runtime.microbatch import Microbatch, present
from weft.runtime.monitor import Limits, Monitor
from weft.topology.mesh import Mesh
from weft.torch import products, recording, scratch
from weft.torch.metrics import count_replicas_once
from weft.torch.pipeline import Pipeline
from weft.torch.random_state import Streams, mix
from weft.transport.rings import Rings
from weft.transport.torch_dist import TorchChannel
from weft.visible import keep_log_visible
from weft.watch.progress import Progress, wanted

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


_session: Session | None = None


def session() -> Session:
    """The present session; :class:`UsageError` before ``init``."""
    if _session is None:
        raise UsageError("weft is not initialised: call weft.init(...) first, before anything else of weft")
    return _session


def is_initialized() -> bool:
    """Whether :func:`init` was called in this process, and :func:`shutdown` not since."""
    return _session is not None


def is_tracing() -> bool:
    """Whether the step only rehearses: it is measured, or compared with one process."""
    if _session is None or not _session.tracing:
        return False
    _session.asked = True
    return True


def init(config: Mapping[str, Any] | None = None) -> None:
    """Join the job. Every rank calls this first, with the same settings.

    ``config``: settings by name, see ``docs/settings.md``; those of the launch (``WEFT_CONFIG``, ``weft run
    --config`` and ``--set``) win over it. Calling it again replaces the settings (not ``partitions``).

    Raises :class:`ConfigError` for settings that are wrong, on every rank, and :class:`DivergenceError` on
    every rank when they were started with different ones; nothing has been changed then.
    """
    global _session
    place = rendezvous.locate(discover(os.environ))
    settings = resolve(config, os.environ, place.world_size)
    if _session is not None:
        _change(_session, settings)
        return
    from weft.torch.self_check import check  # it runs what is built on sessions

    check(place.rank == 0)
    count_replicas_once(_present)
    keep_log_visible()
    keep_memory(os.environ)  # before there are more threads
    timeout = timeout_of(settings)
    limits = Limits(settings.heartbeat_timeout, settings.wait_timeout)
    patience = timedelta(seconds=limits.start + JUDGE_S)
    place, store, monitor = rendezvous.enter(place, limits, patience)
    agree(store, place, described(settings), patience)
    recorder = recording.open_recorder(settings, place)
    device = choose_device(place)
    if place.world_size > 1:
        rendezvous.init_process_group(place, store, "gloo", timeout)
    mesh = Mesh(place.world_size, settings.partitions, placement=settings.placement_strategy)
    groups = make_groups(mesh, place.rank, timeout)
    _session = Session(settings, place, mesh, device, groups, Streams(device), monitor)
    _session.store = store
    _session.nccl = device.type == "cuda" and dist.is_nccl_available() and have_own_gpus(_session)
    if settings.partitions > 1:
        _connect(_session)
    recording.start(_session, recorder)
    products.multiplier.allowed = not settings.deterministic
    _session.progress = wanted(place.rank, os.environ)
    monitor.note("")
    atexit.register(_leave)


def _present() -> Session | None:
    return _session


def timeout_of(settings: Settings) -> timedelta:
    """How long a collective waits: longer than the judge, who knows whom to blame."""
    return timedelta(seconds=settings.wait_timeout + JUDGE_S)


def described(settings: Settings) -> dict[str, str]:
    """What every rank must have been started with alike."""
    return {
        "settings": settings.to_json(),
        "the version of weft": weft.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        "the kind of device": "cuda" if torch.cuda.is_available() else "cpu",
        "the script": os.path.basename(sys.argv[0]) if sys.argv else "",
    }


def _change(session: Session, settings: Settings) -> None:
    """A repeated ``init``: new settings for the same mesh."""
    old = session.settings
    if (settings.partitions, settings.placement_strategy) != (old.partitions, old.placement_strategy):
        raise ConfigError(
            f"weft is initialised with {old.partitions} partitions ({old.placement_strategy}); a repeated init cannot "
            f"make that {settings.partitions} ({settings.placement_strategy}): call weft.shutdown() before it"
        )
    if settings.record != old.record:
        recording.stop(session)
        recording.start(session, recording.open_recorder(settings, session.place))
    if settings.optimize == "auto" and session.models and any(model.partitioned for model in session.models):
        settings = replace(
            settings, optimize=old.optimize, memory_weight=old.memory_weight
        )  # decided, see room
    session.settings = settings
    products.multiplier.allowed = not settings.deterministic
    session.chosen = session.watch = None
    if session.executor is not None:
        session.executor.wait_timeout_s = settings.wait_timeout + JUDGE_S


def rings_of(group: Any, device: torch.device) -> Rings | None:
    """Memory for sends between the CPU ranks of a group that share a host; every rank of the group calls this."""
    return Rings.connect(group) if device.type == "cpu" else None


def _connect(session: Session) -> None:
    """The pipeline's channel and executor."""
    direct = direct_groups(session)
    group = session.group("pp")
    channel = TorchChannel(group, session.device, direct, rings=rings_of(group, session.device))
    session.pipeline = Pipeline(
        session.position("pp"), session.mesh.pp, session.device, channel, session.streams,
        replicas=session.mesh.rdp,
    )  # fmt: skip
    monitor = session.monitor
    peers, replicas = session.peers("pp"), session.peers("rdp")

    def rank_of(peer: int) -> int:
        return peers[peer] if peer >= 0 else replicas[-1 - peer]

    hooks = Hooks(
        resume=lambda m: _resume(session, m),
        note=lambda phase, microbatch, peer: monitor.note(
            phase, session.steps, microbatch, None, None if peer is None else rank_of(peer)
        ),
        locate=monitor.locate,
    )
    if session.device.type == "cpu":
        hooks.leave = scratch.giver()
    session.pipeline.note = monitor.note
    session.executor = Executor(
        channel.mailbox, session.position("pp"), session.settings.wait_timeout + JUDGE_S, hooks
    )


def _resume(session: Session, microbatch: Microbatch) -> None:
    """Bring in a microbatch's own random states, unless they are there still; those of the one before it are kept."""
    streams, before = session.streams, session.drawing
    if before is microbatch:
        return
    own = None if session.pipeline is None else session.pipeline.own
    if before is not None and not before.done:
        before.kept = streams.capture()
    if own and before is not None:
        before.held = own.take()
    if own:
        own.put(own.first if microbatch.held is None else microbatch.held)
        microbatch.held = None
    session.drawing = microbatch
    if microbatch.kept is None:
        streams.seed(mix(session.seed, microbatch.index))
    else:
        streams.restore(microbatch.kept)


def choose_device(place: Place) -> torch.device:
    """CUDA device ``local_rank`` where there are GPUs (shared when there are fewer than ranks), else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def default_takes_host_tensors() -> bool:
    """Whether the default group can be weft's group of all ranks: a script may have made one for GPUs only."""
    return "gloo" in dist.get_backend()


def make_groups(mesh: Mesh, rank: int, timeout: timedelta) -> dict[tuple[int, ...], Any]:
    """The gloo groups of ``rank``; every rank takes part in making all of them.

    One for all axes with the same ranks, and none for a rank alone: each keeps a thread that never sleeps for long.
    """
    if mesh.world_size == 1:
        return {}
    axes = ("pp", "tp", "rdp", "dp", "mp", *(() if default_takes_host_tensors() else ("world",)))
    wanted = dict.fromkeys(ranks for axis in axes for ranks in mesh.groups(axis))
    made = {ranks: dist.new_group(ranks, timeout, "gloo") for ranks in wanted if len(ranks) > 1}
    return {ranks: group for ranks, group in made.items() if rank in ranks}


def gpu_of(device: torch.device) -> str:
    """A name for a GPU that no other one has, whatever number it has for a process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def have_own_gpus(session: Session) -> bool:
    """Whether no two ranks of the job share a GPU; every rank calls this."""
    group = session.group("world")
    if group is None:
        return True
    own = torch.tensor([mix(gpu_of(session.device))])
    return len(set(gather_rows(own, group).view(-1).tolist())) == session.place.world_size


def direct_groups(session: Session) -> dict[tuple[int, int], Any]:
    """NCCL groups by (sender, receiver) position in this rank's pipeline, one for each direction of each pair.

    Empty where there is no NCCL or ranks share a GPU: NCCL refuses that, so tensors go through host memory.
    """
    direct: dict[tuple[int, int], Any] = {}
    if not session.nccl:
        return direct
    for ranks in session.mesh.groups("pp"):
        for sender, receiver in itertools.permutations(ranks, 2):
            pair = sorted((sender, receiver))
            group = dist.new_group(pair, session.timeout, "nccl", device_id=session.device)
            if session.rank in (sender, receiver):
                direct[ranks.index(sender), ranks.index(receiver)] = group
    return direct


def shutdown() -> None:
    """Leave the job together with all other ranks; also done at the end of the script."""
    if _session is not None:
        _finish_saving(_session)
    atexit.unregister(_leave)
    _leave()


def _finish_saving(session: Session) -> None:
    """Wait for an asynchronous save; its error is raised."""
    if session.saves is not None and session.saves.pending is not None:
        with session.doing("the last save"):
            try:
                session.saves.finish()
            except Exception as error:
                session.monitor.locate(error)
                raise


def _leave() -> None:
    global _session
    if _session is None:
        return
    try:
        _finish_saving(_session)
    except Exception as error:  # the script has ended, so nobody else can make the job fail
        _session.monitor.end_with(error)
    leaving, _session = _session, None
    for shown in (leaving.progress, leaving.values):
        if shown is not None:
            shown.close()
    pipeline = None if leaving.pipeline is None else leaving.pipeline.channel
    channels = [channel for channel in (pipeline, leaving.replicas) if channel is not None]
    if leaving.saves is not None:
        leaving.saves.close()
    if not leaving.broken:
        leaving.monitor.note("wait", leaving.steps, None, "weft.shutdown")
        for channel in channels:
            channel.flush()
        leaving.monitor.note("", leaving.steps)
    if leaving.executor is not None:
        leaving.executor.close()
    recording.stop(leaving)
    together = leaving.monitor.finish()
    for channel in channels:
        channel.close()
    for channel in channels if together else ():
        channel.join()
    atexit.unregister(rendezvous.shutdown)
    rendezvous.shutdown(leaving.monitor)
