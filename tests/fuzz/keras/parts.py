"""Layers and models of drawn programs that are classes, and what plain Keras has in place of weft's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

L = keras.layers


@keras.saving.register_keras_serializable("fuzz")
class Scaled(L.Layer):  # type: ignore[misc]
    """A weight of its own, a loss of its own, a state that it writes; as the numbers say."""

    def __init__(self, adds: bool = False, counts: bool = False, **named: Any) -> None:
        super().__init__(**named)
        self.adds, self.counts, self.supports_masking = adds, counts, True

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        if self.counts:
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: Any = None) -> Any:
        if self.adds:
            self.add_loss(0.01 * keras.ops.mean(x**2))
        if self.counts and training:
            self.calls.assign_add(1.0)
        return x * self.scale


class Branched(keras.Model):  # type: ignore[misc]
    """A model of its own class with layers in a list and in a dict, one of which is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = [L.Dense(width, "tanh"), L.Dense(width)]
        self.named = {"norm": L.LayerNormalization(), "again": L.Dense(width, "tanh")}
        self.supports_masking = True

    def call(self, x: Any, training: Any = None) -> Any:
        for part in self.parts:
            x = part(x)
        again = self.named["again"]
        return self.named["norm"](again(again(x)) + x)


def note(found: dict[str, Any], what: str, numbers: Any) -> None:
    """Keep numbers that are compared."""
    if isinstance(numbers, dict):
        found.update({f"{what} {name}": value for name, value in numbers.items()})
    else:
        found.update({f"{what} {number}": value for number, value in enumerate(tf.nest.flatten(numbers))})


class Out:
    """A step's output in one process."""

    def __init__(self, parts: list[Any], shares: list[float]) -> None:
        self.outputs, self.shares = parts, shares

    def reduce_mean(self) -> Any:
        if isinstance(self.outputs[0], tf.IndexedSlices):
            pairs = zip(self.shares, self.outputs, strict=True)
            values = tf.concat([tf.constant(share, part.dtype) * part.values for share, part in pairs], 0)
            indices = tf.concat([part.indices for part in self.outputs], 0)
            return tf.IndexedSlices(values, indices, self.outputs[0].dense_shape)
        return tf.add_n(
            [
                tf.constant(share, part.dtype) * part
                for share, part in zip(self.shares, self.outputs, strict=True)
            ]
        )

    accumulate = reduce_mean

    def merge(self) -> Any:
        return tf.concat(self.outputs, 0) if self.outputs[0].shape.rank else tf.stack(self.outputs)


class Plain:
    """One process: what programs use of `weft.tensorflow`, with microbatches one after the other."""

    split = False
    Model = keras.Model

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches

    def wrap(self, net: Any) -> Any:
        if any(getattr(each, "_keras_mask", None) is not None for each in getattr(net, "outputs", ())):
            self.microbatches = 1  # losses are means over unmasked positions, whatever the microbatches
        return net

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        traced = tf.function(function)

        def call(*tensors: Any) -> Any:
            tensors = tuple(
                tf.nest.map_structure(tf.convert_to_tensor, each) if each is not None else None
                for each in tensors
            )
            size = int(tf.nest.flatten(tensors)[0].shape[0])
            count = min(self.microbatches, size)
            bounds = [(n * size // count, (n + 1) * size // count) for n in range(count)]
            found = [
                traced(*tf.nest.map_structure(lambda each, a=a, b=b: each[a:b], tensors)) for a, b in bounds
            ]
            shares = [(b - a) / size for a, b in bounds]
            flat = [
                Out(list(parts), shares) if parts[0] is not None else None
                for parts in zip(*map(tf.nest.flatten, found), strict=True)
            ]
            return tf.nest.pack_sequence_as(found[0], flat)

        return call

    def name(self) -> str:
        """The name of a file of this process."""
        return f"plain-{os.getpid()}"

    def clip(self, gradients: list[Any], norm: float) -> list[Any]:
        return list(tf.clip_by_global_norm(gradients, norm)[0])

    def variables(self, model: Any) -> list[tuple[int, Any]]:
        """Their numbers, and the variables that are here."""
        return list(enumerate(model.variables))


class Split:
    """The same over ranks."""

    split = True

    def __init__(self) -> None:
        import weft.tensorflow as weft

        self.weft = weft
        self.Model = weft.DistributedModel

    def wrap(self, net: Any) -> Any:
        return self.weft.DistributedModel(net)

    def step(self, function: Callable[..., Any]) -> Any:
        return self.weft.step(function, allow_uneven=True)

    def name(self) -> str:
        """The name of a file that all ranks have; one process has started them."""
        return f"split-{os.getppid()}"

    def clip(self, gradients: list[Any], norm: float) -> list[Any]:
        return list(self.weft.clip_by_global_norm(gradients, norm)[0])

    def variables(self, model: Any) -> list[tuple[int, Any]]:
        numbers = {id(each): number for number, each in enumerate(model.all_variables())}
        return [(numbers[id(each)], each) for each in model.variables if model.owner_of(each) is not None]
