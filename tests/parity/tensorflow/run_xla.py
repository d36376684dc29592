"""Steps whose phases XLA compiles: each check compares with a function that XLA compiles in one process.

weft run -n 2 tests/parity/tensorflow/run_xla.py NAME ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import (
    Checks,
    M,
    begin,
    build,
    data,
    loss_of,
    near,
    parts,
    same_gradients,
)

L = keras.layers
check = Checks()


def body(model: Any, a: Any, b: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(b, model(a, training=True))
    return tape.gradient(loss, model.trainable_variables), loss


def one_process(model: Any, x: Any, y: Any) -> tuple[list[Any], Any]:
    """Mean gradients and mean loss of microbatches, each of which XLA has compiled as a whole."""
    whole = tf.function(lambda a, b: body(model, a, b), jit_compile=True)
    found = [whole(a, b) for a, b in parts(x, y)]
    gradients = [tf.add_n(list(each)) / M for each in zip(*(each for each, _ in found), strict=True)]
    return gradients, tf.add_n([loss for _, loss in found]) / M


def compiled(step: Any) -> list[bool]:
    """Of each function of a step on this rank, whether XLA compiles it."""
    (traced,) = step._compiled.values()
    functions = [each.function for each in traced.runnable.functions.values() if each.function is not None]
    return [function.function_def.attr["_XlaMustCompile"].b for function in functions]


def told(call: Callable[[], Any]) -> list[str]:
    """What the log says in a call."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    try:
        call()
    finally:
        logging.getLogger("weft").removeHandler(handler)
    return found


@check
def around_the_step(partitions: int) -> None:
    """The function around is not compiled, its messages and its optimizer; the phases are."""
    begin(partitions)
    x, y = data()
    plain, model = build(dropout=0.3), weft.DistributedModel(build(dropout=0.3))
    first, second = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    step = weft.step(lambda a, b: body(model, a, b))

    @tf.function(jit_compile=True)
    def train(a: Any, b: Any) -> Any:
        gradients, loss = step(a, b)
        means = [each.accumulate() for each in gradients]
        second.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return means, loss.reduce_mean()

    for number in range(3):
        expected, loss = one_process(plain, x, y)
        means, own = train(x, y)
        near(own, loss, f"the loss of step {number}")
        same_gradients(model, means, expected)
        first.apply_gradients(zip(expected, plain.trainable_variables, strict=True))
    assert compiled(step) and all(compiled(step)), compiled(step)


@check
def asked_of_the_step(partitions: int) -> None:
    for executor in ("graph", "eager"):
        begin(partitions, executor=executor)
        x, y = data()
        plain, model = build(), weft.DistributedModel(build())
        step = weft.step(lambda a, b, model=model: body(model, a, b), jit_compile=True)
        expected, loss = one_process(plain, x, y)
        for _ in range(2):
            gradients, own = step(x, y)
            near(own.reduce_mean(), loss, f"the loss by {executor}")
            same_gradients(model, gradients, expected)
        assert compiled(step) and all(compiled(step)), compiled(step)
        other = weft.step(lambda a, b, model=model: body(model, a, b))
        other(x, y)
        assert not any(compiled(other)), compiled(other)


@check
def asked_of_compile(partitions: int) -> None:
    begin(partitions)
    x, y = data(32)
    histories = []
    model = weft.DistributedModel(build())
    for net in (build(), model):
        net.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"], jit_compile=True,
        )  # fmt: skip
        histories.append(net.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history)
    for name, values in histories[0].items():
        near(histories[1][name], values, f"{name} of fit", 1e-4)
    step = model._weft_steps["train"]
    assert compiled(step) and all(compiled(step)), compiled(step)


class Inner(keras.layers.Layer):
    """A layer with a function of its own that XLA compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(8, "tanh")

    @tf.function(jit_compile=True)
    def compute(self, x: Any) -> Any:
        return self.dense(x) * tf.sigmoid(x[:, :1])

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.compute(x)


@check
def inside_of_the_model(partitions: int) -> None:
    begin(partitions)
    x, y = data()

    def made() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        return keras.Sequential([L.Input((6,)), Inner(), Inner(), L.Dense(8, "relu"), L.Dense(3)])

    plain, model = made(), weft.DistributedModel(made())
    found = [body(plain, a, b) for a, b in parts(x, y)]
    expected = [tf.add_n(list(each)) / M for each in zip(*(each for each, _ in found), strict=True)]
    for wanted in (False, True):
        step = weft.step(lambda a, b: body(model, a, b), jit_compile=wanted)
        gradients, loss = step(x, y)
        near(loss.reduce_mean(), np.mean([each for _, each in found]), f"the loss, jit_compile={wanted}")
        same_gradients(model, gradients, expected, f"jit_compile={wanted}: a gradient")
    assert len(model.trainable_variables) < len(plain.trainable_variables)


class Told(keras.layers.Layer):
    """What XLA does not compile: a text is made of the values."""

    def call(self, x: Any) -> Any:
        return x + tf.cast(tf.strings.length(tf.strings.as_string(tf.reduce_sum(x)))[..., None] > 0, x.dtype)


@check
def what_cannot_be_compiled_is_told_and_runs(partitions: int) -> None:
    begin(partitions)
    x, y = data()

    def made() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        return keras.Sequential([L.Input((6,)), L.Dense(8, "relu"), Told(), L.Dense(8, "tanh"), L.Dense(3)])

    plain, model = made(), weft.DistributedModel(made())
    found = [body(plain, a, b) for a, b in parts(x, y)]
    expected = [tf.add_n(list(each)) / M for each in zip(*(each for each, _ in found), strict=True)]
    step = weft.step(lambda a, b: body(model, a, b), jit_compile=True)
    outputs: list[Any] = []
    first = told(lambda: outputs.append(step(x, y)))
    again = told(lambda: outputs.append(step(x, y)))
    for gradients, _ in outputs:
        same_gradients(model, gradients, expected)
    lines = [line for line in first if line.startswith("XLA does not compile")]
    assert len(lines) == compiled(step).count(False) <= 1, (lines, compiled(step))
    assert not again, again
    told_by = sum(weft_sum(len(lines)))
    assert told_by == 1, told_by


def weft_sum(number: int) -> list[int]:
    """The numbers of all ranks."""
    from weft.session.collectives import gather_texts
    from weft.tensorflow.session.session import session

    return [int(text) for text in gather_texts(str(number), session().port())]


@check
def loops(partitions: int) -> None:
    """The states of a loop are lists, which XLA does not hand on: such phases run without it."""
    begin(partitions)
    rng = np.random.default_rng(0)
    x, y = tf.constant(rng.normal(size=(8, 5, 6)), tf.float32), tf.constant(rng.integers(0, 3, 8))

    def made() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        return keras.Sequential([L.Input((5, 6)), L.LSTM(8, return_sequences=True), L.GRU(8), L.Dense(3)])

    plain, model = made(), weft.DistributedModel(made())
    found = [body(plain, a, b) for a, b in parts(x, y)]
    expected = [tf.add_n(list(each)) / M for each in zip(*(each for each, _ in found), strict=True)]
    step = weft.step(lambda a, b: body(model, a, b), jit_compile=True)
    same_gradients(model, step(x, y)[0], expected)


if __name__ == "__main__":
    check.work()
