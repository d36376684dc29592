"""One contender: trains a model for some steps and prints what a step took, as JSON on rank 0.

python -m benchmarks.tensorflow.worker CONTENDER MODEL STEPS
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tensorflow as tf

L = keras.layers
BATCH, MICROBATCHES, LENGTH, WORDS = 32, 4, 64, 512
Step = Callable[[Any, Any], Any]


class Block(L.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = L.LayerNormalization(), L.LayerNormalization()
        self.attention = L.MultiHeadAttention(4, width // 4, dropout=0.1)
        self.up, self.down, self.drop = L.Dense(4 * width, "gelu"), L.Dense(width), L.Dropout(0.1)

    def call(self, x: Any, training: Any = None) -> Any:
        y = self.first(x)
        x = x + self.attention(y, y, use_causal_mask=True, training=training)
        return x + self.drop(self.down(self.up(self.second(x))), training=training)


def gpt(width: int) -> Any:
    tokens = L.Input((LENGTH,), dtype="int32")
    x = L.Embedding(WORDS, width)(tokens)
    for _ in range(4):
        x = Block(width)(x)
    return keras.Model(tokens, L.Dense(WORDS)(L.LayerNormalization()(x)))


def cnn() -> Any:
    x = images = L.Input((32, 32, 3))
    for width in (16, 32, 64):
        for _ in range(2):
            x = L.Dropout(0.1)(
                L.Activation("relu")(L.BatchNormalization()(L.Conv2D(width, 3, padding="same")(x)))
            )
        x = L.MaxPooling2D()(x)
    return keras.Model(images, L.Dense(10)(L.GlobalAveragePooling2D()(x)))


def problem(name: str) -> tuple[Any, Any, Any]:
    """The model and a batch."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    if name == "cnn":
        images = random.normal(size=(BATCH, 32, 32, 3)).astype("float32")
        return cnn(), tf.constant(images), tf.constant(random.integers(0, 10, BATCH))
    words = random.integers(0, WORDS, (BATCH, LENGTH + 1)).astype("int32")
    return gpt(int(name.removeprefix("gpt"))), tf.constant(words[:, :-1]), tf.constant(words[:, 1:])


def body(model: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        found = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        loss = tf.reduce_mean(found)
    return tape.gradient(loss, model.trainable_variables), loss


def plain(model: Any, microbatches: int) -> Step:
    """One process: gradients of the mean over microbatches."""

    @tf.function
    def step(x: Any, y: Any) -> Any:
        total, losses = None, []
        for a, b in zip(tf.split(x, microbatches), tf.split(y, microbatches), strict=True):
            found, loss = body(model, a, b)
            found = [tf.convert_to_tensor(each) for each in found]
            total = found if total is None else [one + two for one, two in zip(total, found, strict=True)]
            losses.append(loss)
        return [each / microbatches for each in total], tf.add_n(losses) / microbatches

    return step


def with_weft(model: Any, executor: str) -> Step:
    import weft.tensorflow as weft

    weft.init({"partitions": 2, "microbatches": MICROBATCHES, "executor": executor})
    split = weft.DistributedModel(model)
    gradients = weft.step(lambda x, y: body(split, x, y))

    def step(x: Any, y: Any) -> Any:
        found, loss = gradients(x, y)
        return [each.accumulate() for each in found], loss.reduce_mean()

    return step if executor == "eager" else tf.function(step)


def measure(step: Step, x: Any, y: Any, steps: int) -> float:
    """The median of the steps, in ms."""
    for _ in range(3):
        step(x, y)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        _, loss = step(x, y)
        float(loss)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    contender, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    threads = 2 if contender.endswith("2 threads") else 1
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if contender.startswith("weft"):
        import weft.tensorflow as weft

        weft.init({"partitions": 2, "microbatches": MICROBATCHES, "executor": contender.split()[1]})
    model, x, y = problem(name)
    if contender.startswith("weft"):
        step = with_weft(model, contender.split()[1])
    else:
        step = plain(model, 1 if "whole" in contender else MICROBATCHES)
    took = measure(step, x, y, steps)
    if int(os.environ.get("RANK", "0")) == 0:
        print("TOOK " + json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
