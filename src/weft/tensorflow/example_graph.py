"""The graph of a Keras model that a script makes, for ``weft trace``: counted in one process, without a job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from weft.errors import UsageError
from weft.graph import Graph
from weft.session.cut import Cut
from weft.tensorflow.mini_batch import prepare
from weft.tensorflow.split.units import make_units
from weft.tensorflow.trace import capture


def traced_graph(found: Sequence[Any], microbatches: int = 1) -> Graph:
    """The units of a model with what they cost, for one microbatch.

    Args:
        found: The model, a mini-batch, and if need be a loss function of the result, or of the result and the batch.
            A tensor is ``model(batch)``; a tuple ``model(*batch)``, a dict ``model(batch)``.
        microbatches: Into how many microbatches the mini-batch is cut.

    Raises:
        SplitError: The mini-batch cannot be cut.
        UsageError: That is no example, or the model fails (``__cause__`` is its error then).
    """
    if len(found) not in (2, 3):
        raise UsageError(
            "the function returned no model and mini-batch: return model, batch or model, batch, loss"
        )
    model, given, *rest = found
    model = getattr(model, "module", model)
    loss: Callable[..., Any] | None = rest[0] if rest else None

    def run(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            marks = capture.tracing()
            assert marks is not None
            with capture.noted(lambda first, end: marks.models.append((model, first, end))):
                arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
                result = model(*arguments)
            start = _start(loss, result, batch)
        return tape.gradient(start, model.trainable_variables)

    cut = prepare(run, (given,), {}, Cut(), microbatches)

    def traced(*tensors: Any) -> Any:
        args, _ = cut.arguments(tensors)
        return run(*args)

    try:
        captured = capture.capture("example", traced, cut.specs(), lambda handle: "")
    except Exception as error:
        raise UsageError(f"the model failed: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return make_units(captured.record).graph


def _start(loss: Callable[..., Any] | None, result: Any, batch: Any) -> Any:
    """The number at which the backward pass begins."""
    if loss is not None:
        return loss(result, batch) if len(inspect.signature(loss).parameters) > 1 else loss(result)
    parts = result.values() if isinstance(result, Mapping) else tf.nest.flatten(result)
    return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in tf.nest.flatten(list(parts))])
