"""The first microbatch, run on the rank that decides: measured, and tried out with weights cut over ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError
from weft.schedule.table import KINDS
from weft.torch.delayed_parameters import has_delayed
from weft.torch.execution.gradients import Gradients, Tensors
from weft.torch.execution.thread_settings import no_training, rehearse
from weft.torch.model import DistributedModel
from weft.torch.session.session import Session
from weft.torch.tensor_parallel import Splits
from weft.torch.tensors.mini_batch import MiniBatch, Padding
from weft.torch.tensors.pytree import map_tensors
from weft.torch.trace.record import Trace
from weft.torch.trace.side_effects import Kept, copy_argument, hand_to_step, homes_of, without_side_effects
from weft.torch.trace.times import Clock
from weft.torch.trace.trace import trace
from weft.torch.trace.without_values import AsWithValues, on_meta

log = logging.getLogger("weft")


def trace_step(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, counted: bool
) -> Trace:
    """One microbatch of the step, measured; estimated for a model that no rank can run alone.

    Runs on the rank that decides. ``counted``: the step says itself what its microbatches weigh.
    """
    if _without_values(session, model):
        try:
            return _traced(session, model, function, batch, counted, delayed=True)
        except UsageError as error:
            if session.device.type != "cpu" or any(has_delayed(other.module) for other in session.models):
                raise
            large = "" if session.rehearsal else ", although it is large"
            log.warning("the model is traced with its values%s: %s", large, error.__cause__)
    return _traced(session, model, function, batch, counted, delayed=False)


def _traced(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, counted: bool,
    delayed: bool,
) -> Trace:  # fmt: skip
    padding = Padding()
    padding.done = counted or delayed
    with _alone(session, model, function, batch, padding, delayed) as (run, kept):
        traced = _trace_by_settings(session, model.module, run, kept, delayed)
    padding.warn(batch)
    return traced


def find_splits(
    session: Session,
    model: DistributedModel,
    function: Callable[..., Any],
    batch: MiniBatch,
    leaking: Collection[str],
) -> Splits | None:
    """The model's weights that can be cut over ranks; None if they are not to be. On the rank that decides.

    ``leaking``: modules out of which tensors get by another way than their result.
    """
    settings = session.settings
    size = settings.tensor_parallel_degree
    if size == 1:
        return None
    from weft.torch.tensor_parallel.find import find  # it loads DTensor

    with forward_only(session, [model], function, batch) as run:
        return find(model.module, run, size, settings.sequence_parallel, settings.experts, leaking)


@contextmanager
def forward_only(
    session: Session, models: Sequence[DistributedModel], function: Callable[..., Any], batch: MiniBatch
) -> Iterator[Callable[[], Any]]:
    """A function that runs the first microbatch's forward pass on this rank alone; inside, that leaves nothing
    behind."""
    padding = Padding()
    padding.done = True
    with ExitStack() as stack:
        run, kept = stack.enter_context(
            _alone(session, models[0], function, batch, padding, _without_values(session, models[0]))
        )
        for number, model in enumerate(models):
            stack.enter_context(
                without_side_effects(model.module, session.streams, kept=None if number else kept)
            )
        rehearse(Forward())
        try:
            yield run
        finally:
            rehearse(None)


class Forward:
    """A rehearsal of which only the forward pass matters."""

    going_back = False
    outside_modules = True

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """Nothing: there are no gradients."""

    @contextmanager
    def inside_function(self, name: str, given: Any) -> Iterator[None]:
        """A function of the script's runs."""
        yield


@contextmanager
def _alone(
    session: Session, model: DistributedModel, function: Callable[..., Any], batch: MiniBatch, padding: Padding,
    delayed: bool,
) -> Iterator[tuple[Callable[[], Any], Kept]]:  # fmt: skip
    """A function that runs the first microbatch on this rank alone, and what to bring back after it.

    ``delayed``: the model is run without its values, so the microbatch has no data either.
    """
    args, kwargs = map_tensors(batch.slice(0), copy_argument)
    if delayed:
        args, kwargs = map_tensors((args, kwargs), on_meta_device)
    kept = Kept(homes_of(function, model.module))

    def run() -> Any:
        given, named = map_tensors((args, kwargs), hand_to_step)
        with nullcontext() if padding.done else padding, no_training(batch.fault):
            result = function(*given, **named)
        if session.rehearsal is not None:
            session.rehearsal.result = result
        return result

    session.monitor.note("trace", session.steps + 1)
    with session.rehearsing(), ExitStack() as stack:
        for other in session.models:
            if other is not model and not other.partitioned:
                stack.enter_context(without_side_effects(other.module, session.streams))
        try:
            for other in session.models if delayed else ():
                if other is model or not other.partitioned:
                    stack.enter_context(on_meta(other.module))
            for thing in (function, args, kwargs, *(other.module for other in session.models)):
                kept.note(thing)
            yield run, kept
        except BaseException as error:
            session.monitor.locate(error)
            raise


def _without_values(session: Session, model: DistributedModel) -> bool:
    """True if the step runs on this rank alone without values: a model that it may call has none, or no room."""
    return any(other.estimated for other in session.models if other is model or not other.partitioned)


def on_meta_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without data."""
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _trace_by_settings(
    session: Session, root: nn.Module, run: Callable[[], Any], kept: Kept, delayed: bool
) -> Trace:
    counting = Clock(session.rehearsal.rates) if session.rehearsal is not None else Clock()
    settings = session.settings
    shards = settings.tensor_parallel_degree > 1 or settings.sharded_data_parallel_degree > 1
    chunked_loss = "off" if shards else settings.chunked_loss  # a head that is sharded computes whole logits
    traced = functools.partial(
        trace, root, run, streams=session.streams, kept=kept, chunked_loss=chunked_loss
    )
    if not delayed and (session.settings.deterministic or session.rehearsal is not None):
        with counting as clock:
            return traced(device=session.device, clock=clock)
    if not delayed:
        split = KINDS[session.settings.pipeline].measured
        return traced(device=session.device, split=split)
    with AsWithValues(), counting as clock:
        try:
            return traced(device=torch.device("meta"), clock=clock)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error):
                raise
            raise UsageError(
                f"the step cannot be traced without data, because something in it reads a tensor's value: {error}. "
                "Leave such code out of the first step (weft.is_tracing() tells). Or let the model have values there: "
                "without weft.delay_param_initialization(), and with a memory_limit that its gradients fit"
            ) from error
