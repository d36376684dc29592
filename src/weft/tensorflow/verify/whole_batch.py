"""Microbatches beside the whole batch: are the losses and gradients of a step the same?

A mean over rows is the mean of its microbatches. A loss that joins rows is not (pairs, contrasts with the rest of the
batch), nor is a sum that the script writes itself. So before a model is split the rank that decides traces the step
twice more: for one microbatch, and for two of them in one piece. It runs both when the first batch is there, and
before anything else is computed:

    sum of w_i loss_i = loss of all rows        and so for the gradient of each variable

where w_i is what microbatch i weighs. Layers are in evaluation mode, since BatchNorm and Dropout differ between the two
by right. The variables are copies, so nothing is left behind, and the model may have been split since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from weft.errors import VerifyError
from weft.runtime.allocator import host_bytes
from weft.session.collectives import agree_on
from weft.tensorflow import private
from weft.tensorflow.mini_batch import MiniBatch
from weft.tensorflow.output import scalar
from weft.tensorflow.session.session import Session
from weft.tensorflow.trace import capture
from weft.tensorflow.trace.denominators import watch_losses, weights_of
from weft.tensorflow.verify.findings import LIMITS, SMALL, precision_of

log = logging.getLogger("weft")

SHARE = 8
"""The copies may take one part in so many of the memory."""


_NOT_TWICE = {
    ("Random", "Multinomial", "TruncatedNormal"): "draws random numbers",
    ("PyFunc", "Print", "Write", "Queue", "IteratorGetNext"): "does more than to compute",
}
"""Operations by parts of their names, and what a step with one of them does that must not be done twice."""


class Incomparable(Exception):
    """Why the two cannot be compared."""


class WholeBatch:
    """The comparison of a step with the whole batch, which the pipeline's first rank makes once, for all its ranks.

    Args:
        session: The session.
        title: What messages call the step.
        function: What runs for each microbatch, given its arguments.
        batch: The mini-batch.
        captured: The step as it was traced for one microbatch.
        strict: A difference ends the job; else it is a warning.
    """

    def __init__(
        self, session: Session, title: str, function: Callable[..., Any], batch: MiniBatch,
        captured: capture.Capture, strict: bool,
    ) -> None:  # fmt: skip
        self._session, self._title, self._function, self._batch = session, title, function, batch
        self._strict = strict
        self._waits = True
        self._reason = ""
        self._trial: Any = None
        self._limit = 0.0
        self._captured: list[Any] = []
        if session.rank == session.peers("pp")[0]:
            try:
                self._prepare(captured)
            except Exception as error:  # whatever it is, the step itself was traced
                self._reason = (
                    str(error) if isinstance(error, Incomparable) else f"{type(error).__name__}: {error}"
                )

    def prove(self, tensors: Sequence[Any]) -> None:
        """Compare, with the tensors of the first batch; every rank of the pipeline calls this, later calls do nothing.

        Raises:
            VerifyError: The two differ.
        """
        if not self._waits:
            return
        self._waits = False
        session = self._session
        agree_on(
            session,
            session.port("pp"),
            lambda: self._judge(tensors),
            "the whole batch",
            session.peers("pp")[0],
        )
        self._trial, self._captured = None, []

    # --- before the model is split --------------------------------------------------------------------------

    def _prepare(self, captured: capture.Capture) -> None:
        keys = [private.key_of(handle) for handle in captured.variables]
        asked = {key for sources, _ in captured.marks.asked for key in sources}
        if any(keys[number] in asked for each in captured.record.operations for number in each.writes):
            raise Incomparable("it changes the variables that it takes gradients for")
        if not asked and any(each.writes for each in captured.record.operations):
            raise Incomparable("it changes variables and takes no gradients")
        if sum(each.bytes for each in captured.record.variables) * SHARE > host_bytes(
            self._session.place.local_size
        ):
            raise Incomparable("the model is too large for a copy of it")
        self._limit = LIMITS[precision_of(captured.operations)]
        batch = self._batch
        specs = [
            tf.TensorSpec(batch.leaves[number].shape, batch.leaves[number].dtype) for number in batch.tensors
        ]
        with private.outside_of_graphs(), capture.aside(), private.layers_evaluate():
            self._trial = tf.function(self._compare, autograph=False).get_concrete_function(*specs)
            for kinds, what in _NOT_TWICE.items():
                if operation := private.operation_of(self._trial, kinds):
                    raise Incomparable(f"it {what} ({operation})")
            self._captured = [private.copied(each) for each in self._trial.captured_inputs]
        if any(private.is_of_graph(each) for each in self._captured):
            raise Incomparable("it takes a tensor of the function around")

    def _compare(self, *tensors: Any) -> tuple[Any, Any]:
        """The losses of one piece and of its two microbatches; of each gradient the largest difference and element."""
        batch = self._batch
        one, other = batch.slices(tensors)[:2]
        axes = [batch.axes[number] for number in batch.tensors]
        both = [
            a if axis is None else tf.concat([a, b], axis)
            for a, b, axis in zip(one, other, axes, strict=True)
        ]
        shares = batch.shares(tensors)[:2]
        shares = [each / (shares[0] + shares[1]) for each in shares]
        found: dict[Any, list[Any]] = {}
        piece = tf.function(lambda given: self._piece(given, found), autograph=False)
        parts, whole = [piece(one), piece(other)], piece(both)
        reductions = found["reductions"]
        values, errors = [], []
        for number, (reduction, is_loss) in enumerate(reductions):
            a, b = (part[0][number] for part in parts)
            weights = weights_of(reduction, [part[1][number] for part in parts], shares)
            mean = a * scalar(weights[0], a.dtype) + b * scalar(weights[1], b.dtype)
            if is_loss:
                values.append(tf.stack([whole[0][number], mean, a + b]))
            else:
                errors.append(tf.stack([_largest(whole[0][number] - mean), _largest(whole[0][number])]))
        return tf.stack(values or [tf.zeros(3, tf.float64)]), tf.stack(errors or [tf.zeros(2, tf.float64)])

    def _piece(self, tensors: Sequence[Any], found: dict[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        """The losses and gradients of a piece of the batch, and what Keras divides them by."""
        args, kwargs = self._batch.arguments(tensors)
        asked: list[tuple[Any, Any]] = []

        def noted(targets: Sequence[Any], sources: Sequence[Any], gradients: Sequence[Any]) -> None:
            if any(getattr(private.handle_of(each), "dtype", None) == tf.resource for each in sources):
                asked.append((targets, [each for each in gradients if each is not None]))

        with watch_losses() as losses, private.watch_asked(noted, outermost=True):
            result = self._function(*args, **kwargs)
        entries = [(each, losses.of(each), True) for targets, _ in asked for each in targets]
        for targets, gradients in asked:
            entries += [(capture.dense(each), losses.of(targets[0]), False) for each in gradients]
        if not asked:
            scalars = [leaf for leaf in tf.nest.flatten(result) if is_number(leaf)]
            entries = [(leaf, losses.of(leaf), True) for leaf in scalars]
        found["reductions"] = [(reduction, is_loss) for _, reduction, is_loss in entries]
        numbers = [tf.cast(each, tf.float64) for each, _, _ in entries]
        values = [
            tf.reduce_sum(each) if is_loss else each
            for each, (_, _, is_loss) in zip(numbers, entries, strict=True)
        ]
        return values, [reduction and reduction.denominator for _, reduction, _ in entries]

    # --- with the first batch -------------------------------------------------------------------------------

    def _judge(self, tensors: Sequence[Any]) -> str:
        """The difference in words; empty without one."""
        if not self._reason and self._batch.samples(tensors) < self._batch.microbatches:
            self._reason = "the batch has fewer samples than microbatches"
        if self._reason:
            log.info("%s was not compared with the whole batch: %s", self._title, self._reason)
            return ""
        try:
            losses, errors = (
                each.numpy() for each in private.call_with(self._trial, tensors, self._captured)
            )
        except Exception as error:  # the step itself, which comes next, says it better
            log.info("%s was not compared with the whole batch: %s", self._title, type(error).__name__)
            return ""
        fault = self._fault(losses, errors)
        if not fault:
            log.info("verify: %s gives the losses and gradients of its whole batch", self._title)
            return ""
        text = (
            f"{self._title} gives other numbers in microbatches than for the whole batch: {fault}. So its loss joins "
            "rows (pairs, contrasts with the rest of the batch), or is a mean over something else than rows: write "
            '"microbatches": 1, or accept the other loss with "verify": "off"'
        )
        if self._strict:
            raise VerifyError(text)
        log.warning("%s", text)
        return text

    def _fault(self, losses: Any, errors: Any) -> str:
        limit = self._limit
        for whole, mean, total in losses:
            near = [np.isclose(each, whole, limit, limit * SMALL, equal_nan=True) for each in (mean, total)]
            if not (near[0] or (near[1] and not self._strict and not errors[:, 1].any())):
                return f"two microbatches have the loss {mean:.6g}, their rows in one piece {whole:.6g}"
        worst, size = errors.T
        least = SMALL * size.max()  # a gradient that is zero in exact arithmetic is noise
        wrong = np.isfinite(size) & ~(worst <= 10 * limit * np.maximum(size, least) + limit * SMALL**2)
        if wrong.any():
            number = int(np.argmax(np.where(wrong, worst, 0.0)))
            return f"a gradient of up to {size[number]:.3g} differs by {worst[number]:.3g}"
        return ""


def _largest(tensor: Any) -> Any:
    return tf.maximum(tf.reduce_max(tf.abs(tensor)), 0.0)


def is_number(leaf: Any) -> bool:
    """True for a tensor with one floating-point number."""
    return tf.is_tensor(leaf) and leaf.dtype.is_floating and leaf.shape.rank == 0


def has_losses(captured: capture.Capture) -> bool:
    """True if a step that was traced takes gradients, or returns a number."""
    return bool(captured.marks.asked) or any(map(is_number, tf.nest.flatten(captured.result[0])))
