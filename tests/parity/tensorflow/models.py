"""Models of many kinds, each with a batch and a loss: what a split model must train like one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

L = keras.layers
BATCH = 8


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        build: Makes the model.
        batch: The arguments of a step, from a generator of random numbers: inputs and labels.
        loss: The loss of a microbatch from the model and its arguments; the usual one if not given.
        settings: Settings of weft beside partitions and microbatches.
        policy: A policy of Keras for types.
        tolerance: By how much, relative to the largest, values may differ.
        rate: The learning rate.
    """

    build: Callable[[], Any]
    batch: Callable[[np.random.Generator], tuple[Any, ...]]
    loss: Callable[..., Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "float32"
    tolerance: float = 1e-5
    rate: float = 0.05


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def rows(width: int, classes: int = 3) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda rng: (
        rng.normal(size=(BATCH, width)).astype("float32"), rng.integers(0, classes, BATCH),
    )  # fmt: skip


def images(
    size: int, classes: int = 4, batch: int = BATCH
) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda rng: (
        rng.normal(size=(batch, size, size, 3)).astype("float32"), rng.integers(0, classes, batch),
    )  # fmt: skip


def tokens(length: int, words: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        found = rng.integers(0, words, (BATCH, length + 1))
        return found[:, :-1], found[:, 1:]

    return make


def cross_entropy(labels: Any, predictions: Any) -> Any:
    return tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(
            labels, tf.cast(predictions, tf.float32), from_logits=True
        )
    )


def usual_loss(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
    predictions = model(x, training=True)
    loss = cross_entropy(y, predictions)
    if model.losses:
        loss += tf.add_n(model.losses)
    return loss, predictions


# --- layers of Keras ------------------------------------------------------------------------------------------


@case
def mlp() -> Case:
    return Case(
        lambda: keras.Sequential(
            [
                L.Input((6,)),
                L.Dense(16, "silu"),
                L.BatchNormalization(),
                L.Dropout(0.3),
                L.Dense(16, "relu"),
                L.Dense(3),
            ]
        ),
        rows(6),
    )


@case
def unbuilt() -> Case:
    return Case(lambda: keras.Sequential([L.Dense(16, "gelu"), L.Dense(16, "tanh"), L.Dense(3)]), rows(5))


@case
def cnn() -> Case:
    return Case(
        lambda: keras.Sequential(
            [
                L.Input((12, 12, 3)),
                L.Conv2D(8, 3, activation="relu"),
                L.BatchNormalization(),
                L.MaxPooling2D(),
                L.Conv2D(16, 3),
                L.BatchNormalization(),
                L.Activation("swish"),
                L.SpatialDropout2D(0.2),
                L.GlobalAveragePooling2D(),
                L.Dense(4),
            ]
        ),  # fmt: skip
        images(12),
    )


@case
def residual() -> Case:
    def build() -> Any:
        x = inputs = L.Input((10, 10, 3))
        x = L.Conv2D(8, 3, padding="same")(x)
        for _ in range(3):
            y = L.BatchNormalization()(x)
            y = L.Conv2D(8, 3, padding="same", activation="relu")(y)
            x = x + L.Conv2D(8, 3, padding="same")(y)
        return keras.Model(inputs, L.Dense(4)(L.Flatten()(x)))

    return Case(build, images(10))


class Block(L.Layer):
    def __init__(self, width: int, heads: int, dropout: float = 0.1, causal: bool = True) -> None:
        super().__init__()
        self.first, self.second = L.LayerNormalization(), L.LayerNormalization()
        self.attention = L.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.up, self.down, self.drop = L.Dense(4 * width, "gelu"), L.Dense(width), L.Dropout(dropout)
        self.causal = causal

    def call(self, x: Any, training: Any = None) -> Any:
        y = self.first(x)
        x = x + self.attention(y, y, use_causal_mask=self.causal, training=training)
        return x + self.drop(self.down(self.up(self.second(x))), training=training)


class Gpt(keras.Model):
    def __init__(
        self, words: int = 40, length: int = 8, width: int = 16, layers: int = 3, tied: bool = False
    ) -> None:
        super().__init__()
        self.words = L.Embedding(words, width)
        self.places = L.Embedding(length, width)
        self.blocks = [Block(width, 2) for _ in range(layers)]
        self.norm = L.LayerNormalization()
        self.head = None if tied else L.Dense(words)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.words(x) + self.places(tf.range(tf.shape(x)[1]))
        for block in self.blocks:
            x = block(x, training=training)
        x = self.norm(x)
        if self.head is None:
            return tf.matmul(x, self.words.embeddings, transpose_b=True)
        return self.head(x)


@case
def gpt() -> Case:
    return Case(Gpt, tokens(8, 40))


@case
def tied() -> Case:
    return Case(lambda: Gpt(tied=True), tokens(8, 40))


class EncoderDecoder(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = L.Embedding(30, 16)
        self.encoder = [Block(16, 2, causal=False) for _ in range(2)]
        self.decoder = [Block(16, 2) for _ in range(2)]
        self.cross = [L.MultiHeadAttention(2, 8) for _ in range(2)]
        self.head = L.Dense(30)

    def call(self, inputs: Any, training: Any = None) -> Any:
        source, target = inputs
        memory = self.words(source)
        for block in self.encoder:
            memory = block(memory, training=training)
        x = self.words(target)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = block(x, training=training)
            x = x + cross(x, memory)
        return self.head(x)


@case
def encoder_decoder() -> Case:
    def batch(rng: np.random.Generator) -> tuple[Any, ...]:
        found = rng.integers(0, 30, (3, BATCH, 7))
        return (found[0], found[1]), found[2]

    return Case(EncoderDecoder, batch)


@case
def lstm() -> Case:
    return Case(
        lambda: keras.Sequential(
            [
                L.Input((7,)),
                L.Embedding(30, 8),
                L.LSTM(12, return_sequences=True, dropout=0.1),
                L.GRU(10),
                L.Dense(3),
            ]
        ),
        lambda rng: (rng.integers(0, 30, (BATCH, 7)), rng.integers(0, 3, BATCH)),
    )


@case
def bidirectional() -> Case:
    return Case(
        lambda: keras.Sequential(
            [
                L.Input((7,)),
                L.Embedding(30, 8, mask_zero=True),
                L.Bidirectional(L.LSTM(6, return_sequences=True)),
                L.Bidirectional(L.GRU(5)),
                L.Dense(3),
            ]
        ),  # fmt: skip
        lambda rng: (rng.integers(0, 30, (BATCH, 7)), rng.integers(0, 3, BATCH)),
    )


# --- control flow, functions, gradients of one's own ------------------------------------------------------------


class Loops(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = L.Dense(8, "tanh"), L.Dense(8, "tanh"), L.Dense(3)
        self.scale = self.add_weight(shape=(8,), initializer="ones")

    def call(self, x: Any) -> Any:
        x = self.first(x)
        if not self.inner.built:
            self.inner.build(x.shape)
        _, x = tf.while_loop(
            lambda i, value: i < 3, lambda i, value: (i + 1, self.inner(value) * self.scale + value), [0, x]
        )
        x = tf.cond(tf.reduce_mean(x) > 0, lambda: x * self.scale, lambda: tf.sin(x))
        return self.last(x)


@case
def loops() -> Case:
    return Case(Loops, rows(5))


class Functions(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = L.Dense(8), L.Dense(8), L.Dense(3)
        self.norm = L.BatchNormalization()
        self.second.build((None, 8))  # no variables are made inside of a function that is called again
        self.norm.build((None, 8))

    @tf.function
    def inner(self, x: Any, training: Any) -> Any:
        return self.norm(tf.nn.silu(self.second(x)), training=training)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.inner(self.first(x), training) + x[:, :1]
        return self.last(self.inner(x, training))


@case
def functions() -> Case:
    return Case(Functions, rows(5), tolerance=1e-4)  # two samples in a BatchNorm make much of the last bit


@tf.custom_gradient
def doubled(x: Any) -> Any:
    return tf.identity(x), lambda dy: 2.0 * dy


class CustomGradient(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = L.Dense(8), L.Dense(8), L.Dense(3)

    def call(self, x: Any) -> Any:
        x = doubled(self.first(x))
        x = tf.recompute_grad(lambda value: tf.nn.silu(self.second(value)) * 2.0)(x)
        return self.last(doubled(x))


@case
def custom_gradient() -> Case:
    return Case(CustomGradient, rows(5))


# --- what models do with their layers -----------------------------------------------------------------------------


class Twice(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.middle, self.last = (
            L.Dense(8),
            L.Dense(8, "tanh"),
            L.Dense(8),
            L.Dense(3),
        )

    def call(self, x: Any) -> Any:
        return self.last(self.shared(self.middle(self.shared(self.first(x)))))


@case
def twice() -> Case:
    return Case(Twice, rows(5))


@case
def regularised() -> Case:
    return Case(
        lambda: keras.Sequential(
            [
                L.Input((5,)),
                L.Dense(8, kernel_regularizer="l2"),
                L.ActivityRegularization(0.01),
                L.Dense(8, "relu", kernel_regularizer="l1"),
                L.Dense(3),
            ]
        ),  # fmt: skip
        rows(5),
    )


@case
def frozen() -> Case:
    def build() -> Any:
        model = keras.Sequential(
            [L.Input((5,)), L.Dense(8), L.BatchNormalization(), L.Dense(8, "relu"), L.Dense(8), L.Dense(3)]
        )
        model.layers[1].trainable = model.layers[2].trainable = False
        return model

    return Case(build, rows(5))


@case
def many_inputs() -> Case:
    def build() -> Any:
        a, b = L.Input((5,), name="a"), L.Input((4,), name="b")
        x, y = L.Dense(8, "relu")(a), L.Dense(8, "tanh")(b)
        both = L.Concatenate()([x, y])
        return keras.Model(
            {"a": a, "b": b}, {"left": L.Dense(3)(both), "right": L.Dense(2)(L.Dense(6)(x * y))}
        )

    def batch(rng: np.random.Generator) -> tuple[Any, ...]:
        x = {
            "a": rng.normal(size=(BATCH, 5)).astype("float32"),
            "b": rng.normal(size=(BATCH, 4)).astype("float32"),
        }
        return x, {"left": rng.integers(0, 3, BATCH), "right": rng.integers(0, 2, BATCH)}

    def loss(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
        found = model(x, training=True)
        return cross_entropy(y["left"], found["left"]) + cross_entropy(y["right"], found["right"]), found

    return Case(build, batch, loss)


@case
def mixed_bfloat16() -> Case:
    return Case(mlp().build, rows(6), policy="mixed_bfloat16", tolerance=2e-2)


@case
def mixed_float16() -> Case:
    return Case(gpt().build, tokens(8, 40), policy="mixed_float16", tolerance=5e-3)


def application(name: str, size: int, **options: Any) -> Case:
    return Case(
        lambda: getattr(keras.applications, name)(
            weights=None, input_shape=(size, size, 3), classes=4, classifier_activation=None, **options
        ),
        images(size, batch=4 * BATCH),
        policy="float64",  # deep ones make much of the last bit: a ReLU that turns over, a BatchNorm of few numbers
        tolerance=1e-6,
        rate=1e-3,
    )


APPLICATIONS = {
    "ResNet50": 64, "MobileNetV2": 64, "DenseNet121": 64, "EfficientNetB0": 32, "InceptionV3": 75, "Xception": 71,
    "NASNetMobile": 64, "ConvNeXtTiny": 32, "VGG16": 32,
}  # fmt: skip
for _name, _size in APPLICATIONS.items():
    CASES[_name] = lambda name=_name, size=_size: application(name, size)
