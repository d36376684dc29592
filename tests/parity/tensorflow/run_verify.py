"""The first batch of a trace beside one process: right programs pass, wrong ones end the step on every rank.

weft run -n 2 tests/parity/tensorflow/run_verify.py NAME ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import Checks
from tests.parity.tensorflow.run_keras import CROSS, classifier, rows, seeded, tagger, told, words
from weft.errors import PeerError, VerifyError
from weft.tensorflow.session.session import session

L = keras.layers
check = Checks()


def begin(partitions: int, **settings: Any) -> None:
    weft.init({"partitions": partitions, "microbatches": 4, "verify": "gradients", **settings})


def passes(what: str, act: Callable[[], Any], text: str = "gives the losses of one process") -> None:
    found = told(act)
    assert weft.rank() or text in found, (what, text, found)


@check
def right_programs(partitions: int) -> None:
    fit = "fit gives the losses of one process (4 microbatches"
    x, y, weights = rows(14)

    def trained(**settings: Any) -> None:
        begin(partitions, **settings)
        model = weft.DistributedModel(seeded(lambda: classifier(L.BatchNormalization(), L.Dropout(0.5))))
        model.compile(keras.optimizers.Adam(0.05), CROSS(from_logits=True), metrics=["accuracy"])
        given = {"batch_size": 8, "sample_weight": weights, "verbose": 0}
        passes("fit", lambda: model.fit(x, y, epochs=2, **given), fit)
        passes("evaluate", lambda: model.evaluate(x, y, batch_size=8, verbose=0), "evaluate gives the losses")
        passes("predict", lambda: model.predict(x, batch_size=8, verbose=0), "predict gives the losses")
        again = told(lambda: model.fit(x, y, **given))
        assert "one process" not in again, again
        passes(
            "other shapes", lambda: model.fit(x[:6], y[:6], batch_size=6, verbose=0), "fit gives the losses"
        )

    trained(executor="eager")
    trained()
    sentences, tags = words(8)
    model = weft.DistributedModel(seeded(lambda: tagger(L.LSTM(8, return_sequences=True))))
    model.compile("adam", CROSS(from_logits=True))
    passes("a tagger", lambda: model.fit(sentences, tags, batch_size=8, verbose=0), fit)


def step_of(model: Any, change: Callable[[Any], Any] = lambda found: found) -> Any:
    @weft.step
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(change(model(x, training=True)) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    return step


@check
def what_cannot_be_compared_is_said(partitions: int) -> None:
    begin(partitions)
    x, y, _ = rows(8)
    draws = tf.random.Generator.from_seed(3)
    cases: dict[str, Callable[[Any], Any]] = {
        "(RandomStandardNormal)": lambda found: found + tf.random.normal(tf.shape(found)),
        "(EagerPyFunc)": lambda found: found + tf.py_function(lambda: 1.0, [], tf.float32),
        "(PrintV2)": lambda found: (tf.print("", end=""), found)[1],
        "(Timestamp)": lambda found: found + 0.0 * tf.cast(tf.timestamp(), tf.float32),
        "gives the losses of one process": lambda found: found + draws.normal(tf.shape(found)),
    }
    for text, change in cases.items():
        model = weft.DistributedModel(seeded(classifier))
        step = step_of(model, change)
        passes(text, lambda step=step: step(x, y), text)
        assert text not in told(lambda step=step: step(x, y))


@check
def a_step_with_its_optimizer_inside(partitions: int) -> None:
    begin(partitions)
    x, y, _ = rows(8)
    model = weft.DistributedModel(seeded(classifier))
    optimizer = keras.optimizers.Adam(0.05)

    @weft.step
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = CROSS(from_logits=True)(y, model(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    passes("an optimizer inside", lambda: step(x, y), "what it writes into")


@check
def results_of_the_arguments_alone(partitions: int) -> None:
    """Results of the arguments alone come last and wait for nothing: the step has not ended with them."""
    begin(partitions)
    x, _ = words(8)
    words_in = keras.Input((5,), dtype="int32")
    read = L.Dense(4, "tanh")(L.Dense(6, "tanh")(L.Embedding(9, 6, mask_zero=True)(words_in)))
    read = L.GlobalMaxPooling1D()(read)
    model = weft.DistributedModel(keras.Model(words_in, [L.Dense(1, "sigmoid")(read), L.Dense(2)(read)]))

    @weft.step
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            one, other = model(x, training=True)
            loss = tf.reduce_mean(one**2) + tf.reduce_mean(other**2)
        return tape.gradient(loss, model.trainable_variables), loss, [one, other]

    whole = tf.function(lambda x: step(x)[1].reduce_mean())
    passes("the places of rows", lambda: whole(tf.constant(x)))


class Apart(L.Layer):  # type: ignore[misc]
    """Computes other things on other ranks, in one of several ways."""

    def __init__(self, kind: str, **named: Any) -> None:
        super().__init__(**named)
        self.kind, self.by = kind, 1.0 + weft.rank()

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any) -> Any:
        if self.kind == "state":
            self.seen.assign_add(self.by)
        if self.kind == "gradient":
            return other_gradient(x, self.by)
        return x * self.by if self.kind == "output" else x


def other_gradient(x: Any, by: float) -> Any:
    @tf.custom_gradient
    def call(x: Any) -> Any:
        return x, lambda gradient: gradient * by

    return call(x)


WRONG = {
    "output": "The first to differ is net/apart (partition 1)",
    "gradient": "The first to differ is the gradient of net/apart (partition 1)",
    "state": "the variable net/apart/seen is another one than in one process",
}


def wrong(kind: str, partitions: int) -> None:
    weft.init({"partitions": partitions, "microbatches": 4, "verify": "gradients", "auto_partition": False})
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    x, y, _ = rows(8)

    class Net(weft.DistributedModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = L.Dense(8, "tanh"), L.Dense(3)
            self.apart = Apart(kind, name="apart")
            self.first.build((None, 6))
            self.last.build((None, 8))

        def call(self, x: Any, training: Any = None) -> Any:
            with weft.partition(0):
                x = self.first(x)
            with weft.partition(1):
                x = self.apart(x)
            with weft.partition(0):
                return self.last(x)

    model = Net()
    before = {id(each): np.array(each) for each in model.trainable_variables}
    model.compile("sgd", CROSS(from_logits=True), jit_compile=False)
    try:
        model.fit(x, y, batch_size=8, verbose=0)
    except Exception as error:
        joined = session()
        assert isinstance(joined.failure, (VerifyError, PeerError)), error
        assert WRONG[kind] in str(joined.failure) and '"verify": "off"' in str(joined.failure), joined.failure
        own = model.trainable_variables
        assert all((before[id(each)] == each.numpy()).all() for each in own)
    else:
        raise AssertionError(f"{kind}: nothing was found")


@check
def wrong_output(partitions: int) -> None:
    wrong("output", partitions)


@check
def wrong_gradient(partitions: int) -> None:
    wrong("gradient", partitions)


@check
def wrong_state(partitions: int) -> None:
    wrong("state", partitions)


if __name__ == "__main__":
    check.work()
