"""``init`` and ``shutdown``: a process joins its job, and leaves it."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import keras
import tensorflow as tf
import torch

import weft
from weft.config import Settings, resolve, with_named
from weft.errors import ConfigError, UsageError
from weft.launch import rendezvous
from weft.launch.discovery import discover
from weft.launch.rehearsal import Asked
from weft.launch.startup import agree
from weft.runtime.allocator import host_bytes, resident_bytes
from weft.schedule.table import KINDS
from weft.session import current, recording
from weft.session.leaving import finish_at_the_end, finish_saving, leave
from weft.session.session import JUDGE_S, timeout_of
from weft.session.state import Process
from weft.tensorflow import private
from weft.tensorflow.clip import watch_clipping
from weft.tensorflow.optimizers import watch_optimizers
from weft.tensorflow.session.session import Session, observe, present, session
from weft.tensorflow.session.wire import TRAVEL
from weft.terminal_text import keep_log_visible
from weft.topology.mesh import Mesh
from weft.transport.groups import make_groups
from weft.transport.rings import Rings
from weft.transport.torch_dist import TorchChannel
from weft.untrusted import MOST_RANKS, whole
from weft.watch.monitor import Limits
from weft.watch.progress import open_progress


def init(config: Mapping[str, Any] | None = None, **named: Any) -> None:
    """Join the job. Every rank calls this first, with the same settings, before TensorFlow computes anything.

    ``config``: settings by name, see ``docs/settings.md``; they may be arguments as well, ``init(partitions=2)``. Those
    of the launch (``WEFT_CONFIG``, ``weft run --config`` and ``--set``) win over both.
    Calling it again replaces the settings (not ``partitions``).

    Raises :class:`ConfigError` for settings that are wrong, on every rank, :class:`DivergenceError` on every rank
    when they were started with different ones, and :class:`UsageError` where TensorFlow works already and has too few
    threads, or where Keras runs on another framework; nothing has been changed then.
    """
    _check_backend()
    if Asked.from_environ(os.environ) is not None:
        raise UsageError("weft rehearse is for PyTorch: this script uses weft.tensorflow")
    place = rendezvous.locate(discover(os.environ))
    settings = resolve(with_named(config, named), os.environ, place.world_size)
    _check(settings)
    if current.is_initialized():
        _change(session(), settings)
        return
    set_threads(os.environ, settings.partitions)
    keep_log_visible()
    timeout = timeout_of(settings)
    limits = Limits(settings.heartbeat_timeout, settings.wait_timeout)
    patience = timedelta(seconds=limits.start + JUDGE_S)
    place, store, monitor = rendezvous.enter(place, limits, patience)
    agree(store, place, describe_start(settings), patience)
    recorder = recording.open_recorder(settings, place)
    if place.world_size > 1:
        rendezvous.init_process_group(place, store, "gloo", timeout)
    mesh = Mesh(place.world_size, settings.partitions, placement=settings.placement_strategy)
    groups = make_groups(mesh, place.rank, timeout)
    joined = Session(
        settings=settings, place=place, mesh=mesh, monitor=monitor, store=store, groups=groups,
        travel=TRAVEL,
    )  # fmt: skip
    current.enter(joined)
    watch_optimizers()
    watch_clipping()
    private.watch_functions()
    if settings.partitions > 1:
        group = joined.group("pp")
        joined.channel = TorchChannel(group, torch.device("cpu"), rings=Rings.connect(group))
    recording.start(joined, recorder, joined.channel, _process(joined))
    joined.views.progress = open_progress(place.rank, os.environ)
    monitor.note("")
    sys.excepthook = functools.partial(_report, sys.excepthook)
    atexit.register(_leave)


def _process(joined: Session) -> Process:
    """The facts of this process for a recording."""
    limit = int(joined.settings.memory_limit * 2**30) or host_bytes(joined.place.local_size)
    versions = {
        "weft": weft.__version__, "TensorFlow": tf.__version__, "Keras": keras.__version__,
        "Python": platform.python_version(),
    }  # fmt: skip
    return Process("cpu", limit, versions, resident_bytes(), observe=observe)


def _report(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show weft's own error where TensorFlow has made one of its own of it, with a longer text."""
    joined = present()
    if joined is not None and isinstance(joined.failure, SystemExit):
        raise joined.failure
    if joined is not None and joined.failure is not None and str(joined.failure) in str(error):
        kind, error, trace = type(joined.failure), joined.failure, joined.failure.__traceback__
    before(kind, error, trace)


def set_threads(environ: Mapping[str, str], partitions: int) -> None:
    """Give TensorFlow as many threads as the launch says (``OMP_NUM_THREADS``), and one more to wait for messages.

    Raises:
        UsageError: TensorFlow works already, with a single thread for operations: it would wait for itself.
    """
    threads = tf.config.threading
    if not private.context_exists():
        wanted = whole(environ.get("OMP_NUM_THREADS", ""), MOST_RANKS)
        if wanted and not threads.get_intra_op_parallelism_threads():
            threads.set_intra_op_parallelism_threads(wanted)
        if partitions > 1 and threads.get_inter_op_parallelism_threads() < 2:
            threads.set_inter_op_parallelism_threads(2)
        return
    if partitions > 1 and threads.get_inter_op_parallelism_threads() == 1:
        raise UsageError(
            "TensorFlow works already, and tf.config.threading.set_inter_op_parallelism_threads(1) was called: a rank "
            "of a pipeline needs two, one of which waits for messages. Call weft.init before TensorFlow computes "
            "anything, or leave that setting out"
        )


def describe_start(settings: Settings) -> dict[str, str]:
    """The settings and versions that every rank must have been started with alike."""
    return {
        "settings": settings.to_json(),
        "the version of weft": weft.__version__,
        "the version of TensorFlow": tf.__version__,
        "the version of Keras": keras.__version__,
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        "the script": os.path.basename(sys.argv[0]) if sys.argv else "",
    }


def _check_backend() -> None:
    """Refuse models of Keras that are none of TensorFlow's."""
    found = keras.config.backend()
    if found != "tensorflow":
        other = ", or give the model to weft.torch" if found == "torch" else ""
        raise UsageError(
            f"Keras runs on {found} here, and weft.tensorflow splits its models on TensorFlow: start the job with "
            f"KERAS_BACKEND=tensorflow{other}"
        )


def _check(settings: Settings) -> None:
    """Refuse what only weft.torch can do."""
    only = {
        "devices": "alike", "rebalance": False, "compile": False, "shard_optimizer_state": False,
        "sharded_data_parallel_degree": 1, "offload_activations": False, "offload_optimizer": False,
        "offload_weights": False,
        "tensor_parallel_degree": 1, "context_parallel_degree": 1, "expert_parallel_degree": 1,
        "min_replicas": 0, "trainer_tokens": "",
    }  # fmt: skip
    asked = [name for name, plain in only.items() if getattr(settings, name) != plain]
    if settings.chunked_loss == "on":
        asked.append("chunked_loss")
    if settings.inputs == "first":
        asked.append("inputs")
    if asked:
        raise ConfigError(f"weft.tensorflow has no {', '.join(asked)}: leave it out, or use PyTorch")
    if settings.microbatches == "auto":
        raise ConfigError(
            'microbatches is "auto", which weft.tensorflow does not decide: write a number, "microbatches": 4, say, or '
            "use PyTorch"
        )
    kind = KINDS[settings.pipeline]
    if settings.contiguous and settings.auto_partition and kind.chunks not in ((1, 1), None):
        raise ConfigError(
            f'contiguous is true, and with pipeline "{settings.pipeline}" a microbatch visits each partition several '
            'times: leave one of them out, or write "1f1b" or "gpipe"'
        )
    if kind.splits:
        raise ConfigError(
            f'pipeline is "{settings.pipeline}", whose backward passes are split in two: TensorFlow takes gradients as '
            'a whole; write "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "list" or "auto"'
        )


def _change(joined: Session, settings: Settings) -> None:
    """A repeated ``init``: new settings for the same mesh."""
    old = joined.settings
    if (settings.partitions, settings.placement_strategy) != (old.partitions, old.placement_strategy):
        raise ConfigError(
            f"weft is initialised with {old.partitions} partitions ({old.placement_strategy}); a repeated init cannot "
            f"make that {settings.partitions} ({settings.placement_strategy}): call weft.shutdown() before it"
        )
    recording.change(joined, settings, joined.channel)
    joined.use_settings(settings)


def shutdown() -> None:
    """Leave the job together with all other ranks; also done at the end of the script."""
    if current.is_initialized():
        finish_saving(session())
    atexit.unregister(_leave)
    _leave()


def _leave() -> None:
    leaving = present()
    if leaving is None:
        return
    finish_at_the_end(leaving)
    current.leave()
    leaving.close()
    leave(leaving, leaving.channels)
    atexit.unregister(rendezvous.shutdown)
    rendezvous.shutdown(leaving.monitor)
