"""The result of a step: for every tensor one entry a microbatch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from weft.errors import UsageError
from weft.session.not_a_tensor import NotATensor
from weft.tensorflow import private


def mark_gradient(tensor: Any, variable: int) -> Any:
    """The tensor, known as the gradient of a variable, given by its key."""
    tensor._weft_gradient = variable
    return tensor


def variable_of_gradient(tensor: Any) -> int | None:
    """The key of the variable whose gradient a tensor is, where a step has returned it."""
    return getattr(tensor, "_weft_gradient", None)


def is_gradient(tensor: Any) -> bool:
    """True if a tensor is the gradient of one of this rank's variables, as a step has returned it."""
    return variable_of_gradient(tensor) is not None


def with_values(tensor: Any, change: Callable[[Any], Any]) -> Any:
    """A tensor, or rows of one, with other values."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(change(tensor.values), tensor.indices, tensor.dense_shape)
    return change(tensor)


def scalar(number: Any, dtype: Any) -> Any:
    """A Python number or a tensor as a scalar of this type. `tf.cast` would round a Python number to float32 first."""
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def _shape_of(gradients: Sequence[Any]) -> Any:
    """The shape of which all of these gradients have rows."""
    first, *others = (each.dense_shape for each in gradients)
    if first is None or tf.get_static_value(first) is not None:
        return first
    same = [
        tf.debugging.assert_equal(each, first, "microbatches have rows of other shapes") for each in others
    ]
    with tf.control_dependencies([each for each in same if each is not None]):
        return tf.identity(first)


def _kept(weight: Any, values: Any) -> Any:
    """The values; zeros for a microbatch without samples."""
    return tf.where(weight > 0, values, tf.zeros_like(values))


class Means:
    """The gradients that a step returns, averaged over microbatches, and over replicas with one call for all of them.

    ``average``: from the means of this rank to those of all replicas.
    """

    def __init__(self, average: Callable[[list[Any]], list[Any]]) -> None:
        self._average = average
        self._entries: list[StepOutput] = []
        self._found: list[Any] | None = None

    def add(self, entry: StepOutput) -> None:
        """One more gradient."""
        self._entries.append(entry)

    def of(self, entry: StepOutput) -> Any:
        """The mean of a gradient that was added."""
        if self._found is None:
            self._found = self._average([each.own_mean() for each in self._entries])
        return self._found[next(at for at, each in enumerate(self._entries) if each is entry)]


class StepOutput(NotATensor):
    """One tensor of a step's result, for each microbatch: ``outputs[i]`` is microbatch i's.

    ``weights`` are the microbatches' shares of the samples (equal unless the step allows uneven ones), or of what a
    loss is divided by. ``variable``: the key of the variable whose gradient this is; ``means``: where its mean over the
    replicas comes from.
    """

    REMEDY = (
        "take .reduce_mean(), the batch's mean, .merge(), the samples in order, or .accumulate(), a gradient"
    )

    def __init__(
        self,
        outputs: Sequence[Any],
        weights: Sequence[Any] | None = None,
        variable: int | None = None,
        means: Means | None = None,
    ) -> None:
        self.outputs = list(outputs)
        self.variable = variable
        self.weights = list(weights) if weights is not None else [1.0 / len(self.outputs)] * len(self.outputs)
        self._means = means
        if means is not None:
            means.add(self)

    def reduce_mean(self) -> Any:
        """The mean over microbatches, each with its share of the samples; shape of one entry.

        Of a gradient it is the mean over the replicas of the model, too.
        """
        mean = self.own_mean() if self._means is None else self._means.of(self)
        return mean if self.variable is None else mark_gradient(mean, self.variable)

    def own_mean(self) -> Any:
        """The mean over the microbatches of this replica."""
        outputs = self.outputs
        if not outputs[0].dtype.is_floating and not outputs[0].dtype.is_complex:
            outputs = [tf.cast(each, tf.float32) for each in outputs]
        if not any(map(tf.is_tensor, self.weights)) and len(set(self.weights)) == 1:
            total, weight, count = self._sum(outputs), self.weights[0], len(outputs)
            if weight == 1.0:
                return total
            share = functools.partial(tf.multiply, weight)
            return with_values(total, (lambda values: values / count) if weight == 1.0 / count else share)
        shares = [scalar(weight, outputs[0].dtype) for weight in self.weights]
        pairs = zip(shares, outputs, strict=True)
        return self._sum([with_values(each, functools.partial(tf.multiply, share)) for share, each in pairs])

    def accumulate(self, method: str = "add_n", var: Any = None) -> Any:
        """The mean over microbatches: the gradient of the mini-batch's mean loss; shape of one entry.

        A gradient by rows (``tf.IndexedSlices``, that of an embedding) has the rows of all microbatches.

        ``method``: "add_n", "accumulate_n" or "variable", which adds up in the variable ``var``; all give the same.
        """
        if method not in ("add_n", "accumulate_n", "variable"):
            raise UsageError(
                f'accumulate has the methods "add_n", "accumulate_n" and "variable", not "{method}"'
            )
        mean = self.reduce_mean()
        if method == "variable" and var is not None:
            return var.assign(mean)
        return mean

    def reduce_sum(self) -> Any:
        """The sum over microbatches; shape of one entry."""
        kept = [
            with_values(each, functools.partial(_kept, weight)) if tf.is_tensor(weight) else each
            for weight, each in zip(self.weights, self.outputs, strict=True)
        ]
        return self._sum(kept)

    def concat(self) -> Any:
        """All entries after one another along dim 0: the mini-batch's order. Their masks of Keras, too."""
        outputs = list(map(tf.convert_to_tensor, self.outputs))
        if outputs[0].shape.rank == 0:
            return tf.stack(outputs)
        masks = [private.mask_of(each) for each in outputs]
        whole = self._concat(outputs)
        return whole if any(mask is None for mask in masks) else private.with_mask(whole, self._concat(masks))

    merge = concat

    def stack(self) -> Any:
        """Shape (microbatches, *entry)."""
        return tf.stack(list(map(tf.convert_to_tensor, self.outputs)))

    def _concat(self, entries: Sequence[Any]) -> Any:
        """One after another, without those of microbatches that have no samples."""
        kept = [
            each[: tf.where(weight > 0, tf.shape(each)[0], 0)] if tf.is_tensor(weight) else each
            for weight, each in zip(self.weights, entries, strict=True)
        ]
        return tf.concat(kept, 0)

    @staticmethod
    def _sum(outputs: Sequence[Any]) -> Any:
        """One after the other, so that an entry is let go when it has been added; rows stand side by side."""
        if isinstance(outputs[0], tf.IndexedSlices) and len(outputs) > 1:
            values, indices = (
                tf.concat([getattr(each, name) for each in outputs], 0) for name in ("values", "indices")
            )
            return tf.IndexedSlices(values, indices, _shape_of(outputs))
        total = outputs[0]
        for each in outputs[1:]:
            total = total + each
        return total

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs})"

    def __getattr__(self, name: str) -> NoReturn:
        if (hasattr(tf.Tensor, name) or name in ("numpy", "device")) and not name.startswith("__"):
            self.refuse(f".{name}")
        raise AttributeError(f"a StepOutput has no {name}")
