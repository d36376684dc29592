"""``init`` and ``shutdown``: a process joins its job, and leaves it."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.config import TP_DEGREES, Settings, resolve, with_named
from weft.errors import ConfigError
from weft.import_hooks import when_imported
from weft.launch import rendezvous
from weft.launch.discovery import REPLICA, discover
from weft.launch.rehearsal import Asked
from weft.launch.startup import agree
from weft.runtime.allocator import host_bytes, keep_memory
from weft.runtime.executor import Executor, Hooks
from weft.session import recording
from weft.session.leaving import finish_at_the_end, finish_saving, leave
from weft.session.session import JUDGE_S, timeout_of, wait_timeout_s
from weft.session.state import Process
from weft.session.travel import Travel
from weft.terminal_text import keep_log_visible
from weft.topology.mesh import Mesh
from weft.torch.agreement import Agreement
from weft.torch.backward import matrix_products
from weft.torch.execution.thread_settings import in_microbatch
from weft.torch.offload.activations import Activations
from weft.torch.optimizer import is_local
from weft.torch.pretrained import MODELING, read_by_parts
from weft.torch.replicas.metrics import count_replicas_once
from weft.torch.session import current
from weft.torch.session.device import choose_device, direct_groups, find_release, have_own_gpus, rings_of
from weft.torch.session.observed import observe
from weft.torch.session.offload import offloading
from weft.torch.session.pipeline import Pipeline
from weft.torch.session.random_streams import Streams
from weft.torch.session.session import Session
from weft.torch.verify.self_check import check
from weft.torch.watching import memory_bytes
from weft.transport.groups import make_groups
from weft.transport.torch_dist import TorchChannel
from weft.watch.monitor import Limits
from weft.watch.progress import open_progress


def init(config: Mapping[str, Any] | None = None, **named: Any) -> None:
    """Join the job. Every rank calls this first, with the same settings.

    ``config``: settings by name, see ``docs/settings.md``; they may be arguments as well, ``init(partitions=2)``. Those
    of the launch (``WEFT_CONFIG``, ``weft run --config`` and ``--set``) win over both.
    Calling it again replaces the settings (not ``partitions``).

    Raises :class:`ConfigError` for settings that are wrong, on every rank, and :class:`DivergenceError` on
    every rank when they were started with different ones; nothing has been changed then.
    """
    enter(with_named(config, named))


def enter(config: Mapping[str, Any] | None, dp_has_tp: bool = False) -> None:
    """Joins the job, as :func:`init` does. ``dp_has_tp``: axis `dp` has the ranks that split tensors also if they
    read the same samples, as the original's has."""
    if (asked := Asked.from_environ(os.environ)) is not None and not current.is_initialized():
        from weft.torch.rehearse.job import enter as enter_rehearsal  # here: it loads the planner

        enter_rehearsal(
            asked, partial(resolve, config, os.environ), lambda settings: _reads_alike(settings, dp_has_tp)
        )
        return
    place = rendezvous.locate(discover(os.environ))
    # the ranks of a replica alone are compared below
    settings = resolve(config, os.environ, None if REPLICA in os.environ else place.world_size)
    if current.is_initialized():
        _change(current.session(), settings, dp_has_tp)
        return
    check(place.rank == 0)
    count_replicas_once(current.present)
    keep_log_visible()
    keep_memory(os.environ, place.local_size, settings.offloads)  # before there are more threads
    _check_replicas(settings, place.world_size)
    timeout = timeout_of(settings)
    limits = Limits(settings.heartbeat_timeout, settings.wait_timeout)
    patience = timedelta(seconds=limits.start + JUDGE_S)
    place, store, monitor = rendezvous.enter(place, limits, patience)
    agree(store, place, describe_start(settings), patience)
    recorder = recording.open_recorder(settings, place)
    device = choose_device(place)
    if place.world_size > 1 or settings.offload_weights:
        rendezvous.init_process_group(place, store, "gloo", timeout)
    mesh = Mesh(
        place.world_size, settings.partitions, settings.tp_size, settings.placement_strategy,
        alike=_reads_alike(settings, dp_has_tp),
    )  # fmt: skip
    groups = make_groups(mesh, place.rank, timeout)
    session = Session(
        settings=settings, place=place, mesh=mesh, monitor=monitor, store=store, device=device, groups=groups,
        streams=Streams(device), travel=Travel(in_microbatch, is_remote=lambda tensor: not is_local(tensor)),
    )  # fmt: skip
    session.nccl = (
        device.type == "cuda" and dist.is_nccl_available() and have_own_gpus(device, session.group("world"))
    )
    session.agreement = Agreement(session)
    current.enter(session)
    for file in MODELING:
        when_imported(file, read_by_parts)
    if settings.min_replicas:
        from weft.torch.replicas.rejoin import Rejoin  # few jobs need it

        session.rejoin = Rejoin(os.environ[REPLICA], session)
    session.agreement.watch_optimizers()
    session.activations = Activations(device) if settings.offload_activations else None
    if (
        settings.partitions * settings.tp_size * settings.expert_parallel_degree > 1
        or settings.offload_weights
    ):
        _connect(session)
    recording.start(session, recorder, session.channel, _process(session))
    matrix_products.multiplier.allowed = not settings.deterministic
    session.views.progress = open_progress(place.rank, os.environ)
    monitor.note("")
    atexit.register(_leave)


def _check_replicas(settings: Settings, world_size: int) -> None:
    """Refuse ``min_replicas`` where no launcher keeps replicas apart, or where it takes other ranks for a replica."""
    if not settings.min_replicas:
        return
    if REPLICA not in os.environ:
        raise ConfigError(
            f"min_replicas is {settings.min_replicas}, which weft run has to know before it starts ranks on this "
            f"machine: weft run --min-replicas {settings.min_replicas} --partitions {settings.partitions}"
        )
    if world_size != settings.partitions:
        raise ConfigError(
            f"partitions is {settings.partitions}, but weft run has taken {world_size} for the ranks of a replica: "
            f"with min_replicas give it to weft run as well, --partitions {settings.partitions}"
        )
    if torch.cuda.is_available():
        raise ConfigError(
            'min_replicas is for CPUs: hide the GPUs, weft run --device cpu, or write "min_replicas": 0'
        )


def _process(session: Session) -> Process:
    """The facts of this process for a recording."""
    device = session.device
    total = host_bytes(session.place.local_size)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    limit = int(session.settings.memory_limit * 2**30) or total
    versions = {
        "weft": weft.__version__, "torch": torch.__version__, "Python": platform.python_version(),
        **({"CUDA": str(torch.version.cuda)} if device.type == "cuda" else {}),
    }  # fmt: skip
    cpu_s = session.executor.cpu_s if session.executor is not None else time.thread_time
    make_event = partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None
    captures = torch.cuda.is_current_stream_capturing if device.type == "cuda" else lambda: False
    return Process(str(device), limit, versions, memory_bytes(session), cpu_s, make_event, captures, observe)


def describe_start(settings: Settings) -> dict[str, str]:
    """The settings and versions that every rank must have been started with alike."""
    return {
        "settings": settings.to_json(),
        "the version of weft": weft.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        "the kind of device": "cuda" if torch.cuda.is_available() else "cpu",
        "the script": os.path.basename(sys.argv[0]) if sys.argv else "",
    }


def _reads_alike(settings: Settings, dp_has_tp: bool) -> bool:
    return settings.inputs != "per_rank" and not dp_has_tp


def _change(session: Session, settings: Settings, dp_has_tp: bool) -> None:
    """A repeated ``init``: new settings for the same mesh."""
    old = session.settings
    for name in TP_DEGREES:
        before, after = getattr(old, name), getattr(settings, name)
        if before != after:
            raise ConfigError(
                f"weft is initialised with {name} {before}; a repeated init cannot make that {after}: call "
                "weft.shutdown() before it"
            )
    if (settings.partitions, settings.placement_strategy) != (old.partitions, old.placement_strategy):
        raise ConfigError(
            f"weft is initialised with {old.partitions} partitions ({old.placement_strategy}); a repeated init cannot "
            f"make that {settings.partitions} ({settings.placement_strategy}): call weft.shutdown() before it"
        )
    if settings.offload_weights and session.pipeline is None:
        raise ConfigError(
            "weft is initialised with one partition; a repeated init cannot make offload_weights true: call "
            "weft.shutdown() before it"
        )
    recording.change(session, settings, session.channel)
    if settings.optimize == "auto" and session.models and any(model.partitioned for model in session.models):
        settings = replace(
            settings, optimize=old.optimize, memory_weight=old.memory_weight
        )  # decided, see room
    session.use_settings(settings)
    session.activations = Activations(session.device) if settings.offload_activations else None
    session.mesh = replace(session.mesh, alike=_reads_alike(settings, dp_has_tp))
    matrix_products.multiplier.allowed = not settings.deterministic


def _connect(session: Session) -> None:
    """The pipeline's channel and executor."""
    direct = (
        direct_groups(session.mesh, session.rank, session.device, session.timeout) if session.nccl else {}
    )
    group = session.group("pp")
    channel = TorchChannel(group, session.device, direct, rings=rings_of(group, session.device))
    pipeline = Pipeline(
        session.position("pp"), session.mesh.pp, session.device, channel, session.streams,
        replicas=session.mesh.rdp, offload=offloading,
    )  # fmt: skip
    monitor = session.monitor
    peers, others = session.peers("pp"), (*session.peers("rdp"), *session.peers("tp"))

    def rank_of(peer: int) -> int:
        return peers[peer] if peer >= 0 else others[-1 - peer]

    hooks = Hooks(
        resume=pipeline.draw_for,
        note=lambda phase, microbatch, peer: monitor.note(
            phase, session.steps, microbatch, None, None if peer is None else rank_of(peer)
        ),
        locate=monitor.locate,
    )
    if session.device.type == "cpu":
        hooks.leave = find_release()
    pipeline.note = monitor.note
    turns = session.connect_tensor(channel.mailbox)
    executor = Executor(channel.mailbox, pipeline.rank, wait_timeout_s(session.settings), hooks, turns)
    session.connect(pipeline, executor)


def shutdown() -> None:
    """Leave the job together with all other ranks; also done at the end of the script."""
    if current.is_initialized():
        finish_saving(current.session())
    atexit.unregister(_leave)
    _leave()


def _leave() -> None:
    leaving = current.present()
    if leaving is None:
        return
    finish_at_the_end(leaving)
    current.leave()
    leaving.agreement.close()
    leave(leaving, leaving.channels)
    atexit.unregister(rendezvous.shutdown)
    rendezvous.shutdown(leaving.monitor)
