"""Habits of Keras's users, split over ranks: each check compares with plain Keras in the same process.

weft run -n 2 tests/parity/tensorflow/run_keras.py NAME ...
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import (
    Checks,
    begin,
    near,
    refuses,
    same_gradients,
)
from weft.errors import UsageError
from weft.tensorflow.verify.one_process import Proof

L = keras.layers
check = Checks()
CROSS = keras.losses.SparseCategoricalCrossentropy


def seeded(make: Callable[[], Any]) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    return make()


def same_fit(
    what: str,
    make: Callable[[], Any],
    x: Any,
    y: Any,
    given: Any = (),
    tolerance: float = 1e-4,
    **options: Any,
) -> Any:
    """Trains a model plain and split: the histories, evaluations and predictions are equal.

    ``given``: more arguments of ``fit``; ``options``: those of ``compile``, made anew by functions.
    """
    found = []
    for wrap in (lambda net: net, weft.DistributedModel):
        net = seeded(make)
        model = wrap(net)
        made = {name: value() if callable(value) else value for name, value in options.items()}
        model.compile(keras.optimizers.SGD(0.1), **made)
        more = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0} | dict(given)
        history = model.fit(x, y, **more).history
        told = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        found.append((history, told, model.predict(x, batch_size=8, verbose=0), model))
    (history, told, predicted, _), (own_history, own_told, own_predicted, model) = found
    assert sorted(history) == sorted(own_history), (what, sorted(history), sorted(own_history))
    for name, value in history.items():
        near(own_history[name], value, f"{what}: {name} of fit", tolerance)
    for name, value in told.items():
        near(own_told[name], value, f"{what}: {name} of evaluate", tolerance)
    for one, other in zip(tf.nest.flatten(own_predicted), tf.nest.flatten(predicted), strict=True):
        near(one, other, f"{what}: predictions", tolerance)
    return model


def words(rows: int = 14) -> tuple[Any, Any]:
    """Sentences of other lengths, padded with zeros, and a label for each word."""
    draw = np.random.default_rng(1)
    x = draw.integers(1, 9, (rows, 5))
    for row, length in enumerate(draw.integers(1, 6, rows)):
        x[row, length:] = 0
    return x, x % 3


def tagger(*more: Any) -> Any:
    return keras.Sequential([L.Embedding(9, 8, mask_zero=True), L.Dense(8, "tanh"), *more, L.Dense(3)])


class Tagger(keras.Model):
    """A class of its own, whose mask goes through its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = L.Embedding(9, 8, mask_zero=True), L.LSTM(8, return_sequences=True)
        self.second, self.last = L.Dense(8, "tanh"), L.Dense(3)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.last(self.second(self.first(self.words(x), training=training)))


def two_readers() -> Any:
    """Two inputs, of which one has a mask, that meet in one output without a mask, and one with it."""
    a, b = keras.Input((5,)), keras.Input((4,))
    read = L.Dense(8)(L.Embedding(9, 8, mask_zero=True)(a))
    whole = L.GlobalAveragePooling1D()(read)
    joined = L.Concatenate()([whole, L.Dense(4)(b)])
    return keras.Model(
        [a, b], {"tags": L.Dense(3, name="tags")(read), "score": L.Dense(1, name="score")(joined)}
    )


def attention() -> Any:
    a = keras.Input((5,))
    read = L.Embedding(9, 8, mask_zero=True)(a)
    read = L.MultiHeadAttention(2, 4)(read, read)
    return keras.Model(a, L.Dense(3)(L.GlobalAveragePooling1D()(L.Dense(8)(read))))


@check
def masks_in_fit(partitions: int) -> None:
    begin(partitions)
    x, y = words()
    loss = {
        "loss": lambda: CROSS(from_logits=True),
        "weighted_metrics": ["accuracy"],
        "metrics": ["accuracy"],
    }
    same_fit(
        "through dropout and a norm", lambda: tagger(L.LayerNormalization(), L.Dropout(0.0)), x, y, **loss
    )
    same_fit("a class", Tagger, x, y, **loss)
    same_fit("attention", attention, x, y[:, 0], **loss)
    weights = np.random.default_rng(2).random(x.shape)
    same_fit("with weights", tagger, x, y, {"sample_weight": weights}, loss=loss["loss"])
    both = [x, np.random.default_rng(3).normal(size=(len(x), 4)).astype("float32")]
    given = {"tags": y, "score": np.ones((len(x), 1), "float32")}
    losses = {"tags": CROSS(from_logits=True), "score": "mse"}
    same_fit(
        "two outputs, one with a mask", two_readers, both, given, loss=losses, metrics={"tags": ["accuracy"]}
    )


@check
def masks_in_steps(partitions: int) -> None:
    begin(partitions)
    x, y = words(8)
    loss_of = CROSS(from_logits=True)
    plain, model = seeded(tagger), weft.DistributedModel(seeded(tagger))
    with tf.GradientTape() as tape:
        loss = loss_of(y, plain(x))
    expected = tape.gradient(loss, plain.trainable_variables)

    @weft.step
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(x)
            loss = loss_of(y, predictions)
        return tape.gradient(loss, model.trainable_variables), loss, predictions

    gradients, found, predictions = step(x, y)
    near(found.reduce_mean(), loss, "the loss of a step")
    same_gradients(model, gradients, [tf.convert_to_tensor(each) for each in expected])
    assert (predictions.merge()._keras_mask.numpy() == (x != 0)).all()
    assert (predictions.outputs[1]._keras_mask.numpy() == (x[2:4] != 0)).all()

    given = L.Masking(0.0)(tf.constant(x[..., None] * np.ones(6), tf.float32))
    layers = [L.Dense(6), L.Dense(3)]
    inner = seeded(lambda: keras.Sequential(layers))
    near_loss = loss_of(y, inner(given))
    other = weft.DistributedModel(inner)
    near(
        weft.step(lambda a, b: loss_of(b, other(a)))(given, y).reduce_mean(),
        near_loss,
        "a mask of an argument",
    )


def classifier(*more: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), *more, L.Dense(8, "tanh"), L.Dense(3)])


def rows(count: int = 14) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(4)
    return draw.normal(size=(count, 6)).astype("float32"), draw.integers(0, 3, count), draw.random(count)


@check
def losses_that_are_no_means(partitions: int) -> None:
    begin(partitions)
    x, y, weights = rows()
    unknown = np.where(np.arange(len(y)) % 3 == 0, -1, y)
    kinds = {
        "sum": ({"reduction": "sum"}, y, None),
        "sum with weights": ({"reduction": "sum"}, y, weights),
        "mean over weights": ({"reduction": "mean_with_sample_weight"}, y, weights),
        "weights": ({}, y, weights),
        "labels that do not count": ({"ignore_class": -1}, unknown, None),
    }
    for name, (options, labels, given) in kinds.items():
        same_fit(
            name, classifier, x, labels, {"sample_weight": given},
            loss=lambda options=options: CROSS(from_logits=True, **options), weighted_metrics=["accuracy"],
        )  # fmt: skip
    same_fit(
        "a sum beside the losses of layers", lambda: classifier(L.Dense(8, kernel_regularizer="l2")), x, y,
        loss=lambda: CROSS(from_logits=True, reduction="sum"),
    )  # fmt: skip
    same_fit(
        "weights of classes",
        classifier,
        x,
        y,
        {"class_weight": {0: 1.0, 1: 2.0, 2: 3.0}},
        loss=lambda: CROSS(from_logits=True),
    )


def two_outputs() -> Any:
    a = keras.Input((6,))
    h = L.Dense(8, "tanh")(L.Dense(8, "tanh")(a))
    return keras.Model(a, [L.Dense(3, name="p")(h), L.Dense(1, name="q")(h)])


@check
def outputs_by_name(partitions: int) -> None:
    begin(partitions)
    x, y, weights = rows()
    both = {"p": y, "q": weights[:, None]}
    same_fit(
        "losses by name", two_outputs, x, both, loss=lambda: {"p": CROSS(from_logits=True), "q": "mse"},
        loss_weights={"p": 1.0, "q": 0.5}, metrics={"p": ["accuracy"], "q": ["mae"]},
    )  # fmt: skip
    same_fit(
        "losses in a list", two_outputs, x, list(both.values()), loss=lambda: [CROSS(from_logits=True), "mae"]
    )
    same_fit(
        "losses that divide by other things", two_outputs, x, both,
        loss=lambda: {"p": CROSS(from_logits=True, reduction="sum"), "q": "mse"},
    )  # fmt: skip
    model = weft.DistributedModel(seeded(two_outputs))
    model.compile(keras.optimizers.SGD(0.0), ["mse", "mae"])
    stop = keras.callbacks.EarlyStopping("p_loss", patience=1, mode="min")
    given = [np.ones((len(x), 3), "float32"), np.ones((len(x), 1), "float32")]
    assert len(model.fit(x, given, epochs=5, verbose=0, callbacks=[stop]).history["loss"]) == 2


class OwnLoss(keras.Model):
    """As Keras's pages have it: a loss, a tracker and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = L.Dense(8, "tanh"), L.Dense(3)
        self.tracker, self.error = (
            keras.metrics.Mean(name="own"),
            keras.metrics.MeanAbsoluteError(name="error"),
        )

    def call(self, x: Any) -> Any:
        return self.b(self.a(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        loss = keras.ops.mean((y_pred - y) ** 2) + 3.0
        self.tracker.update_state(loss)
        return loss

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        self.error.update_state(y, y_pred)
        return found | {"own": self.tracker.result(), "error": self.error.result()}

    @property
    def metrics(self) -> Any:
        return [self.tracker, self.error, *super().metrics]


@check
def methods_of_the_model(partitions: int) -> None:
    begin(partitions)
    x, _, _ = rows(16)
    model = same_fit("an own loss", OwnLoss, x, x[:, :3], metrics=["mse"])
    assert model.metrics_names

    class Weighing(OwnLoss):
        def compile(self, optimizer: Any, metrics: Any, weight: float) -> None:
            super().compile(optimizer=optimizer, metrics=metrics)
            self.other.compile("sgd", "mae")
            self.weight = weight

        def __init__(self) -> None:
            super().__init__()
            self.other = keras.Sequential([L.Dense(1)])

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
        ) -> Any:
            return self.weight * super().compute_loss(x, y, y_pred, sample_weight)

    same_fit("an own compile", Weighing, x, x[:, :3], metrics=["mse"], weight=0.5)

    class Stepping(OwnLoss):
        def train_step(self, data: Any) -> Any:
            return {}

    class Predicting(OwnLoss):
        def predict_step(self, data: Any) -> Any:
            return data

    refuses(
        UsageError,
        "Stepping has a train_step of its own",
        lambda: weft.DistributedModel(Stepping()).compile("sgd"),
    )
    refuses(
        Exception, "Predicting has a predict_step of its own",
        lambda: weft.DistributedModel(Predicting()).predict(x, verbose=0),
    )  # fmt: skip


@check
def a_rank_without_variables(partitions: int) -> None:
    """It counts updates as the others do, also of gradients that are accumulated."""
    begin(partitions)
    x, y = np.random.default_rng(2).normal(size=(8, 4, 6)).astype("float32"), np.ones((8, 4, 3))
    for optimizer in (
        keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1),
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, gradient_accumulation_steps=2, global_clipnorm=0.1)
        ),
    ):
        found = []
        for wrap in (lambda net: net, weft.DistributedModel):
            net = seeded(lambda: keras.Sequential([keras.Input((4, 6)), L.Masking(0.0), L.Dense(3)]))
            model = wrap(net)
            model.compile(type(optimizer).from_config(optimizer.get_config()), "mse", jit_compile=False)
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
            found.append((model.evaluate(x, y, verbose=0), int(model.optimizer.iterations)))
        (plain, updates), (own, own_updates) = found
        near(own, plain, "loss", 1e-4)
        assert updates == own_updates == 2, found


class Watched(L.Layer):
    """As with `add_metric` of Keras 2: a layer that keeps a mean of what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        return x


@check
def metrics_in_steps(partitions: int) -> None:
    """They see all microbatches, which do not wait for each other for that."""
    begin(partitions)
    x, y, weights = rows(16)
    both = {"p": y, "q": weights[:, None]}
    waits = "each microbatch waits"

    def fitted() -> None:
        same_fit("a tracker in the loss", OwnLoss, x, x[:, :3], metrics=["mse"])
        same_fit(
            "metrics of layers and outputs", lambda: classifier(Watched()), x, y, {"sample_weight": weights},
            loss=lambda: CROSS(from_logits=True), metrics=["accuracy"], weighted_metrics=["accuracy"],
        )  # fmt: skip
        same_fit(
            "metrics of several outputs", two_outputs, x, both, loss=lambda: {"p": CROSS(from_logits=True), "q": "mse"},
            metrics=lambda: {"p": ["accuracy"], "q": ["mae", keras.metrics.RootMeanSquaredError()]},
            weighted_metrics={"p": ["accuracy"], "q": ["mae"]},
        )  # fmt: skip

    words = told(fitted)
    assert waits not in words, words
    loss_of = CROSS(from_logits=True)
    results: list[list[float]] = []
    for split in (False, True):
        net = seeded(classifier)
        model = weft.DistributedModel(net) if split else net
        kinds = keras.metrics
        metrics = [kinds.SparseCategoricalAccuracy(), kinds.Mean(), kinds.SparseTopKCategoricalAccuracy(2)]
        counted = tf.Variable(0.0)

        def step(x: Any, y: Any, model: Any = model, metrics: Any = metrics, counted: Any = counted) -> Any:
            with tf.GradientTape() as tape:
                predictions = model(x)
                loss = loss_of(y, predictions)
            metrics[0].update_state(y, predictions)
            metrics[1].update_state(loss)
            metrics[2].update_state(y, predictions)
            counted.assign_add(tf.reduce_sum(predictions))
            counted.assign(counted * 0.5)
            return tape.gradient(loss, model.trainable_variables), loss, metrics[0].result(), counted + 0.0

        if split:
            words = told(lambda step=step: results.append([weft.step(step)(x, y)[3].outputs]))
            assert waits not in words, words
        else:
            parts = zip(tf.split(x, 4), tf.split(y, 4), strict=True)
            results.append([[step(*part)[3] for part in parts]])
        results[-1] += [metric.result() for metric in metrics] + [counted.value()]
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        near(other, one, f"metric {number}", 1e-4)


@check
def clipping_of_changed_gradients(partitions: int) -> None:
    begin(partitions)
    x, _, _ = rows(8)
    plain, model = seeded(classifier), weft.DistributedModel(seeded(classifier))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(plain(x) ** 2)
    found = tape.gradient(loss, plain.trainable_variables)
    expected = tf.sqrt(tf.add_n([tf.reduce_sum(each**2) for each in found]))

    @weft.step
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    gradients = [each.accumulate() for each in step(tf.constant(x))]
    kept = [tf.Variable(each) for each in gradients]
    for changed in (
        [each * 1.0 for each in gradients],
        [tf.where(tf.math.is_nan(each), 0.0, each) for each in gradients],
        [each.read_value() for each in kept],
    ):
        refuses(
            UsageError,
            "call weft.clip_by_global_norm",
            lambda given=changed: tf.clip_by_global_norm(given, 0.1),
        )
        refuses(UsageError, "call weft.global_norm", lambda given=changed: tf.linalg.global_norm(given))
        near(weft.clip_by_global_norm(changed, 0.1)[1], expected, "the norm")
    refuses(UsageError, "call weft.clip_by_global_norm", lambda: tf.clip_by_global_norm(kept, 0.1))
    near(tf.linalg.global_norm([tf.ones([4]), tf.ones([5])]), 3.0, "the norm of other tensors")


@check
def former_models(partitions: int) -> None:
    """A model that is freed on one rank earlier than on another: nothing is traced anew for that."""
    begin(partitions)
    x = tf.ones([8, 6])
    gc.collect()
    gc.disable()
    try:
        for fold in range(2):
            model = weft.DistributedModel(seeded(classifier))

            @weft.step
            def step(x: Any, model: Any = model) -> Any:
                return tf.reduce_mean(model(x) ** 2)

            first = float(step(x).reduce_mean())
            if fold and weft.rank() == 0:
                gc.collect()
            near(step(x).reduce_mean(), first, "the loss")
            for layer in model.module.layers:
                layer.trainable = False
            near(step(x).reduce_mean(), first, "the loss of a frozen model")
    finally:
        gc.enable()


def told(act: Callable[[], Any]) -> str:
    """What weft logs while `act` runs; the first rank says it."""
    words: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    log, kept = logging.getLogger("weft"), Kept()
    level = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    try:
        act()
    finally:
        log.removeHandler(kept)
        log.setLevel(level)
    return "\n".join(words)


def pairs(y: Any, predictions: Any) -> Any:
    """Each row beside all others of the batch."""
    unit = tf.math.l2_normalize(predictions, 1)
    rows = tf.range(tf.shape(predictions)[0])
    return keras.losses.sparse_categorical_crossentropy(
        rows, 3.0 * unit @ tf.transpose(unit), from_logits=True
    )


@check
def the_first_batch_is_compared_with_one_process(partitions: int) -> None:
    begin(partitions)
    x, y, _ = rows(8)
    mean: Any = CROSS(from_logits=True)
    cases: dict[str, Callable[[Any, Any], Any]] = {
        "gives the losses and gradients of its whole batch": mean,
        "for the whole batch: two microbatches have the loss": pairs,
        "gives other numbers in microbatches": lambda y, found: mean(y, found) + 8e-4 * pairs(y, found),
        "have the loss": lambda y, found: tf.reduce_sum(found**2),
        "was not compared with the whole batch: it draws random numbers": lambda y, found: mean(
            y, found + tf.random.normal(tf.shape(found))
        ),
    }
    for text, loss_of in cases.items():
        model = weft.DistributedModel(seeded(lambda: classifier(L.BatchNormalization(), L.Dropout(0.5))))

        @weft.step
        def step(x: Any, y: Any, model: Any = model, loss_of: Any = loss_of) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
            return tape.gradient(loss, model.trainable_variables), loss

        before = [np.array(each) for each in model.all_variables()]
        words = told(lambda step=step: step(x, y))
        again = told(lambda step=step: step(x, y))
        assert "whole batch" not in again, again
        if weft.rank() == 0:
            assert text in words, (text, words)
        assert len(before) > len(model.variables)
    for kinds in ({"loss": mean}, {"loss": mean, "jit_compile": True}):
        model = weft.DistributedModel(
            seeded(lambda: classifier(L.Dropout(0.5), L.Dense(8, kernel_regularizer="l2")))
        )
        model.compile("adam", **kinds)
        words = told(lambda model=model: model.fit(x, y, batch_size=8, verbose=0))
        assert weft.rank() or "verify: fit gives the losses and gradients" in words, words


OPTIMIZERS: tuple[Callable[[], Any], ...] = (
    lambda: keras.optimizers.Adam(0.05, clipnorm=0.1),
    lambda: keras.optimizers.RMSprop(0.05, global_clipnorm=0.05),
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adafactor(0.05)),
)


class Recomputed(L.Layer):
    """Asks for gradients itself, in its backward pass."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda given: tf.tanh(given[:, 0] @ self.kernel))(x)


@check
def norms_wait_for_the_proof(partitions: int) -> None:
    """A rank without gradients adds nothing to the norm of all ranks; its sum comes after the proof as elsewhere."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = L.Dense(8, "tanh", trainable=False), L.Dense(3)

        def call(self, x: Any) -> Any:
            with weft.partition(0):
                x = self.first(x)
            with weft.partition(partitions - 1):
                return self.last(x)

    end = Proof.end

    def late(proof: Any, *given: Any) -> None:
        time.sleep(0.3 * (weft.rank() == 0))
        end(proof, *given)

    Proof.end = late
    try:
        begin(partitions, auto_partition=False)
        x, y, _ = rows(16)
        for clipped in ({"global_clipnorm": 0.01}, {"clipnorm": 0.01}):
            losses = []
            for wrap in (lambda model: model, weft.DistributedModel):
                model = wrap(seeded(Net))
                model.compile(keras.optimizers.SGD(0.5, **clipped), CROSS(from_logits=True))
                losses.append(
                    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
                )
            near(losses[1], losses[0], str(clipped))
    finally:
        Proof.end = end


@check
def losses_that_join_rows_behind_loops(partitions: int) -> None:
    """A recurrent layer is a loop, for whose body TensorFlow asks for gradients by itself."""
    begin(partitions)
    x = tf.constant(np.random.default_rng(4).normal(size=(8, 4, 6)), tf.float32)
    for layer in (L.LSTM(4), L.GRU(4, reset_after=False), Recomputed()):
        model = weft.DistributedModel(
            keras.Sequential([keras.Input((4, 6)), layer, L.Dense(4, "tanh"), L.Dense(3, "softmax")])
        )

        @weft.step
        def step(x: Any, model: Any = model) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(pairs(None, model(x, training=True)))
            return tape.gradient(loss, model.trainable_variables), loss

        words = told(lambda step=step: step(x))
        assert weft.rank() or "for the whole batch: two microbatches have the loss" in words, words


@check
def gradients_by_rows(partitions: int) -> None:
    """Keras takes a word's rows in an embedding's gradient one by one, and so it has to get them."""
    begin(partitions)
    x, y = words(8)
    for make in OPTIMIZERS:
        found = []
        for wrap in (lambda net: net, weft.DistributedModel):
            model = wrap(seeded(tagger))
            model.compile(make(), CROSS(from_logits=True), jit_compile=False)
            found.append(model.fit(x, y, epochs=3, batch_size=8, shuffle=False, verbose=0).history["loss"])
        near(*reversed(found), f"the losses of {make().name}", 1e-4)

    plain, model = seeded(tagger), weft.DistributedModel(seeded(tagger))

    def gradients_of(net: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, net(x), from_logits=True))
        return tape.gradient(loss, net.trainable_variables)

    expected = gradients_of(plain, x, y)[0]
    found = weft.step(lambda x, y: gradients_of(model, x, y))(x, y)
    if model.owner_of(model.all_variables()[0]) == weft.pp_rank():
        rows = found[0].accumulate()
        near(rows.values, expected.values, "the rows")
        assert (rows.indices.numpy() == expected.indices.numpy()).all()
        near(found[0].reduce_sum().values, expected.values * len(found[0].outputs), "their sum", 1e-4)
        assert found[0].stack().shape == [len(found[0].outputs), 9, 8]


@check
def gradients_by_rows_of_a_shape_that_is_not_known(partitions: int) -> None:
    """So are those of a tensor whose size only the batch tells."""
    begin(partitions)
    x, _, _ = rows(16)
    plain, model = seeded(classifier), weft.DistributedModel(seeded(classifier))

    def gradient_of(net: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(net(tf.gather(x, [0, 2, 0])) ** 2)
        return tape.gradient(loss, x)

    @weft.step(input_signature=[tf.TensorSpec([None, 6])])
    def step(x: Any) -> Any:
        return gradient_of(model, x)

    for count in (16, 12):
        expected = [gradient_of(plain, part) for part in tf.split(tf.constant(x[:count]), 4)]
        found = step(x[:count])
        for one, other in zip(found.outputs, expected, strict=True):
            near(one.values, other.values, "the rows")
            assert one.indices.numpy().tolist() == other.indices.numpy().tolist()
        near(found.merge(), tf.concat([tf.convert_to_tensor(each) for each in expected], 0), "the whole")
        mean = tf.convert_to_tensor(found.reduce_mean())
        near(mean, tf.add_n([tf.convert_to_tensor(each) for each in expected]) / 4, "the mean")


@check
def compiled_again(partitions: int) -> None:
    """The arguments of `compile` count from the next `fit` on: the loss, the optimizer, the layers that are trained."""
    begin(partitions)
    x, y, _ = rows(8)
    both = {"p": y, "q": np.ones((8, 1), "float32")}
    cross = CROSS(from_logits=True)
    found: list[list[Any]] = []
    for wrap in (lambda net: net, weft.DistributedModel):
        net = seeded(two_outputs)
        model, told = wrap(net), []
        for optimizer, losses, trainable in (
            ("sgd", {"p": cross, "q": "mse"}, True),
            ("adam", {"p": CROSS(from_logits=True, reduction="sum"), "q": "mae"}, True),
            (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), {"p": cross, "q": "mae"}, False),
        ):
            net.layers[1].trainable = trainable
            model.compile(optimizer, losses, metrics={"p": ["accuracy"]}, jit_compile=False)
            told.append(model.fit(x, both, batch_size=8, epochs=2, shuffle=False, verbose=0).history)
            told.append(model.evaluate(x, both, batch_size=8, verbose=0, return_dict=True))
        found.append(told)
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert sorted(one) == sorted(other), (number, sorted(one), sorted(other))
        for name, value in one.items():
            near(other[name], value, f"{name} of {number}", 1e-4)


@check
def batches_smaller_than_microbatches(partitions: int) -> None:
    begin(partitions)
    for count in (9, 3):
        x, y, weights = rows(count)
        loss = {"loss": lambda: CROSS(from_logits=True), "metrics": ["accuracy"]}
        same_fit(f"{count} samples", classifier, x, y, **loss)
        loss["loss"] = lambda: CROSS(from_logits=True, reduction="mean_with_sample_weight")
        same_fit(f"{count} samples with weights", classifier, x, y, {"sample_weight": weights}, **loss)


@check
def uneven_batches_in_double_precision(partitions: int) -> None:
    """What a microbatch weighs is no number of single precision on the way."""
    begin(partitions)
    keras.config.set_floatx("float64")
    try:
        x, y, _ = rows(12)
        given = {
            "batch_size": 5,
            "validation_split": 0.4,
        }  # 5 and 2 samples train, 5 are evaluated; cut into 2
        same_fit("float64", classifier, x, y, given, 1e-13, loss=lambda: CROSS(from_logits=True))
    finally:
        keras.config.set_floatx("float32")


if __name__ == "__main__":
    check.work()
