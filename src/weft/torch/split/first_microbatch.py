"""The first microbatch, run on the rank that decides: measured, and tried out with weights cut over ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from weft.errors import UsageError
from weft.schedule.table import KINDS
from weft.torch.delayed_parameters import has_delayed
from weft.torch.execution.thread_settings import no_training
from weft.torch.model import DistributedModel
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits
from weft.torch.tensors.mini_batch import MiniBatch, Padding
from weft.torch.trace.dry_run import DryRun, Snapshot, dry_run
from weft.torch.trace.record import Trace
from weft.torch.trace.times import Clock
from weft.torch.trace.trace import trace
from weft.torch.trace.without_values import AsWithValues

log = logging.getLogger("weft")


def trace_step(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, counted: bool
) -> Trace:
    """One microbatch of the step, measured; estimated for a model that no rank can run alone.

    Runs on the rank that decides. ``counted``: the step says itself what its microbatches weigh.
    """
    traced = functools.partial(_traced, session, model, function, batch, counted)
    return _with_values_if_need_be(session, model, traced)


T = TypeVar("T")


def _with_values_if_need_be(session: Session, model: DistributedModel, run: Callable[[bool], T]) -> T:
    """The result of ``run``, which does without values where the model has none, or no room for them.

    Raises:
        UsageError: It reads a value, and there are none.
    """
    if not _without_values(session, model):
        return run(False)
    try:
        return run(True)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and "meta" not in str(error):
            raise
        if session.device.type != "cpu" or any(has_delayed(other.module) for other in session.models):
            raise UsageError(
                f"the step cannot be traced without data, because something in it reads a tensor's value: {error}. "
                "Leave such code out of the first step (weft.is_tracing()). Or let the model have values there: "
                "without weft.delay_param_initialization(), and with a memory_limit that its gradients fit"
            ) from error
        large = "" if session.rehearsal else ", although it is large"
        log.warning("the model is traced with its values%s: %s", large, error)
    return run(False)


def _traced(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, counted: bool,
    delayed: bool,
) -> Trace:  # fmt: skip
    padding = Padding()
    padding.done = counted or delayed
    with _alone(session, [model], function, batch, padding, delayed) as (run, dry):
        traced = _trace_by_settings(session, model.module, run, dry.snapshot(), delayed)
    padding.warn(batch)
    return traced


def find_splits(
    session: Session,
    model: DistributedModel,
    function: Callable[..., Any],
    batch: MiniBatch,
    leaking: Collection[str],
    experts: Splits | None = None,
) -> Splits | None:
    """The model's weights that can be cut over ranks; None if they are not to be. On the rank that decides.

    ``leaking``: modules out of which tensors get by another way than their result. ``experts``: those that replicas
    share, which all ranks that split tensors have.
    """
    settings = session.settings
    size = settings.tensor_parallel_degree
    if size == 1:
        return None
    from weft.torch.tensor_parallel.find import find  # it loads DTensor

    def found(run: Callable[[], Any]) -> Splits:
        shared = () if experts is None else experts.linears().keys()
        return find(model.module, run, size, settings.sequence_parallel, settings.experts, leaking, shared)

    return by_forward_runs(session, [model], function, batch, found)


def find_experts(
    session: Session,
    model: DistributedModel,
    function: Callable[..., Any],
    batch: MiniBatch,
    leaking: Collection[str],
) -> Splits | None:
    """The model's experts that replicas can share; None if they are not to. On the rank that decides."""
    size = session.settings.expert_parallel_degree
    if size == 1:
        return None
    from weft.torch.replicas.experts.find import find  # it loads DTensor

    return by_forward_runs(
        session, [model], function, batch, lambda run: find(model.module, run, size, leaking)
    )


def by_forward_runs(
    session: Session, models: Sequence[DistributedModel], function: Callable[..., Any], batch: MiniBatch,
    use: Callable[[Callable[[], Any]], T],
) -> T:  # fmt: skip
    """The result of ``use``, which gets a function that runs the first microbatch's forward pass on this rank alone,
    without consequences."""
    padding = Padding()
    padding.done = True

    def run(delayed: bool) -> T:
        with _alone(session, models, function, batch, padding, delayed) as (once, dry):
            with dry.forward(once) as forward:
                return use(functools.partial(_as_with_values, forward) if delayed else forward)

    return _with_values_if_need_be(session, models[0], run)


def _as_with_values(run: Callable[[], Any]) -> Any:
    """The result of a run without values, whose operations are those of a run with values."""
    with AsWithValues():
        return run()


@contextmanager
def _alone(
    session: Session, models: Sequence[DistributedModel], function: Callable[..., Any], batch: MiniBatch,
    padding: Padding, delayed: bool,
) -> Iterator[tuple[Callable[[], Any], DryRun]]:  # fmt: skip
    """A function that runs the first microbatch on this rank alone, and what to run it in.

    ``delayed``: the model is run without its values, so the microbatch has no data either.
    """
    with dry_run(session, models, function, batch.slice(batch.costliest), without_values=delayed) as dry:

        def run() -> Any:
            args, kwargs = dry.arguments()
            with nullcontext() if padding.done else padding, no_training(batch.fault):
                result = function(*args, **kwargs)
            if session.rehearsal is not None:
                session.rehearsal.result = result
            return result

        yield run, dry


def _without_values(session: Session, model: DistributedModel) -> bool:
    """True if the step runs on this rank alone without values: a model that it may call has none, or no room."""
    return any(other.estimated for other in session.models if other is model or not other.partitioned)


def _trace_by_settings(
    session: Session, root: nn.Module, run: Callable[[], Any], snapshot: Snapshot, delayed: bool
) -> Trace:
    counting = Clock(session.rehearsal.rates) if session.rehearsal is not None else Clock()
    settings = session.settings
    shards = settings.tensor_parallel_degree > 1 or settings.sharded_data_parallel_degree > 1
    chunked_loss = "off" if shards else settings.chunked_loss  # a head that is sharded computes whole logits
    traced = functools.partial(trace, root, run, snapshot=snapshot, chunked_loss=chunked_loss)
    if not delayed and (session.settings.deterministic or session.rehearsal is not None):
        with counting as clock:
            return traced(device=session.device, clock=clock)
    if not delayed:
        split = KINDS[session.settings.pipeline].measured
        return traced(device=session.device, split=split)
    with AsWithValues(), counting as clock:
        return traced(device=torch.device("meta"), clock=clock)
