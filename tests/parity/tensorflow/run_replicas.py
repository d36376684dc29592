"""Two copies of a model that is split in two, each with half of the batch, beside plain Keras with all of it.

weft run -n 4 tests/parity/tensorflow/run_replicas.py NAME ...
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import Checks, near

L, optimizers = keras.layers, keras.optimizers
check = Checks()


def begin(_: int) -> int:
    weft.init({"partitions": 2, "microbatches": 2})
    return weft.rank()


def words(rows: int = 16) -> Any:
    """Sentences in which words repeat, within one copy's half and in both."""
    return np.random.default_rng(0).integers(0, 7, (rows, 3))


def own(*arrays: Any) -> list[Any]:
    """The rows of this rank's copy: every second one."""
    return [each[weft.dp_rank() :: weft.dp_size()] for each in arrays]


def sums() -> Any:
    """Two tables, one of which is read twice, and layers."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    x = keras.Input((3,), dtype="int32")
    table = L.Embedding(20, 4)
    read = L.Concatenate()([table(x), table((x * 3) % 20), L.Embedding(20, 5)(x)])
    return keras.Model(x, L.Dense(1)(L.Dense(6, "tanh")(L.Flatten()(read))))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.05),
    "AdamW, clipped by norms": lambda: optimizers.AdamW(0.05, clipnorm=0.1),
    "RMSprop, clipped by the norm of all": lambda: optimizers.RMSprop(0.05, global_clipnorm=0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Lion": lambda: optimizers.Lion(0.01),
    "Adam, of two batches": lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "Adafactor, scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adafactor(0.05)),
}


@check
def embeddings(_: int) -> None:
    """Rows of a gradient count one by one in Keras's optimizers, and one process has those of all copies."""
    x = words()
    y = x.sum(1, keepdims=True).astype("float32") / 20
    plain, model = sums(), weft.DistributedModel(sums())
    begins = plain.get_weights()

    @tf.function
    def gradients_of(net: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    step = weft.step(lambda x, y: gradients_of.python_function(model, x, y))
    for name, make in OPTIMIZERS.items():
        one, other = make(), make()
        for each in (plain, model):
            each.set_weights(begins)
        for at in range(0, len(x), 4):
            batch = x[at : at + 4], y[at : at + 4]
            found = gradients_of(plain, *batch)
            one.apply_gradients(zip(found, plain.trainable_variables, strict=True))
            means = [each.accumulate() for each in step(*own(*batch))]
            other.apply_gradients(zip(means, model.trainable_variables, strict=True))
            assert isinstance(means[0], tf.IndexedSlices) == (weft.pp_rank() == 0), means
        for at, (value, expected) in enumerate(zip(model.get_weights(), plain.get_weights(), strict=True)):
            near(value, expected, f"{name}: variable {at}", 1e-4)


@check
def embeddings_in_fit(_: int) -> None:
    x = words()
    y = x.sum(1, keepdims=True) / 20
    found = []
    for each, batch in ((sums(), (x, y)), (weft.DistributedModel(sums()), own(x, y))):
        each.compile(OPTIMIZERS["AdamW, clipped by norms"](), "mse", jit_compile=False)
        each.fit(*batch, batch_size=len(batch[0]), epochs=3, shuffle=False, verbose=0)
        found.append(each.get_weights())
    for at, (expected, value) in enumerate(zip(*found, strict=True)):
        near(value, expected, f"variable {at}", 1e-4)


def regression(*more: Any) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((4,)), L.Dense(6, "tanh"), L.Dense(1), *more])


class Cubed(keras.metrics.Metric):
    """As Keras's pages have it: a state that is added to, and a result that is no mean of the copies' results."""

    def __init__(self) -> None:
        super().__init__(name="cubed")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.total + keras.ops.sum(y_pred**2))

    def result(self) -> Any:
        return self.total**3


class Own(keras.Model):
    """Metrics of its own, one of which has a name that is no metric's."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.error = regression(), keras.metrics.RootMeanSquaredError(name="error")
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: Any = None
    ) -> Any:
        loss = keras.ops.mean((y_pred - y) ** 2)
        self.tracker.update_state(loss)
        return loss

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        self.error.update_state(y, y_pred)
        return found | {
            "error": self.error.result(),
            "mean": tf.reduce_mean(y_pred),
            "loss": 2.0 * found["loss"],
        }


def numbers() -> tuple[Any, Any, Any, Any]:
    """What is learned in every row, and validated in those of the first copy; the second copy's say the contrary."""
    draw = np.random.default_rng(3)
    x, more = draw.normal(size=(16, 4)).astype("float32"), draw.normal(size=(9, 4)).astype("float32")
    sign = np.where(np.arange(len(more)) % 2, -0.3, 1.5)[:, None]
    return x, x.sum(1, keepdims=True), more, sign * more.sum(1, keepdims=True)


class Kept(keras.callbacks.Callback):
    """Notes what callbacks are told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.told.append((f"batch {batch}", dict(logs)))

    def on_test_end(self, logs: Any = None) -> None:
        self.told.append(("test", dict(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.told.append((f"epoch {epoch}", dict(logs)))


def alike(told: Any, expected: Any, what: str) -> None:
    assert [name for name, _ in told] == [name for name, _ in expected], (what, told, expected)
    for (name, one), (_, other) in zip(told, expected, strict=True):
        assert sorted(one) == sorted(other), (what, name, one, other)
        for key, value in other.items():
            near(one[key], value, f"{what}: {key} of {name}", 1e-4)


@check
def callbacks_decide_alike(_: int) -> None:
    """They are told what one process is told, also where the copies' own numbers would decide otherwise."""
    x, y, more_x, more_y = numbers()
    halves = [(more_x[at::2], more_y[at::2]) for at in (0, 1)]
    found: list[list[float]] = []
    results = []
    for wrap in (lambda net: net, weft.DistributedModel):
        model, kept = wrap(regression()), Kept()
        given = [x, y, more_x, more_y]
        if wrap is weft.DistributedModel:
            given = own(*given)
        else:
            kept.on_epoch_end = lambda epoch, logs, keep=kept.on_epoch_end, net=model: (
                keep(epoch, logs), found.append([float(np.mean((net(a) - b) ** 2)) for a, b in halves]),
            )  # fmt: skip
        ranks = os.getppid() if wrap is weft.DistributedModel else os.getpid()
        path = Path(tempfile.gettempdir(), f"replicas-{ranks}.weights.h5")
        best = keras.callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True, save_weights_only=True)
        slower = keras.callbacks.ReduceLROnPlateau("val_mae", factor=0.5, patience=0, min_delta=0.05)
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        metrics = ["mae", keras.metrics.RootMeanSquaredError(name="root"), Cubed()]
        model.compile(optimizers.SGD(0.1), "mse", metrics=metrics, jit_compile=False)
        model.fit(
            *given[:2], batch_size=len(given[0]) // 2, epochs=7, shuffle=False, verbose=0,
            validation_data=tuple(given[2:]), validation_batch_size=1, callbacks=[kept, best, slower, stop],
        )  # fmt: skip
        rate = float(model.optimizer.learning_rate)
        results.append((kept.told, len(found), rate, best.best, model.get_weights()))
    for number in (0, 1):
        rises = [
            after > before
            for before, after in zip(found, found[1:], strict=False)
            for before, after in [(before[number], after[number])]
        ]
        assert any(rises) == bool(number), (number, found)
    (told, epochs, rate, least, weights), (own_told, own_epochs, own_rate, own_least, own_weights) = results
    alike(own_told, told, "fit")
    assert (own_epochs, own_rate) == (epochs, rate)
    near(own_least, least, "the best loss", 1e-4)
    for one, other in zip(own_weights, weights, strict=True):
        near(one, other, "the weights at the end", 1e-4)


@check
def logs_of_own_metrics(_: int) -> None:
    x, y, more_x, more_y = numbers()
    told = []
    for wrap in (lambda net: net, weft.DistributedModel):
        model, kept = wrap(Own()), Kept()
        given = (
            own(x, y, more_x[:8], more_y[:8])
            if wrap is weft.DistributedModel
            else [x, y, more_x[:8], more_y[:8]]
        )
        model.compile(optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(
            *given[:2], batch_size=len(given[0]) // 2, epochs=2, shuffle=False, verbose=0, callbacks=[kept],
            validation_data=tuple(given[2:]), validation_batch_size=8,
        )  # fmt: skip
        told.append(kept.told)
    alike(told[1], told[0], "fit")


@check
def losses_that_are_no_means(_: int) -> None:
    """Copies are added up by what Keras divides a loss by, as microbatches are."""
    x, y, _, _ = numbers()
    weights = np.random.default_rng(4).random(len(x)) + np.arange(len(x)) % 2
    kinds = keras.losses.MeanSquaredError
    for reduction, given in (("sum", None), ("mean_with_sample_weight", weights)):
        found = []
        for wrap in (lambda net: net, weft.DistributedModel):
            model, kept = wrap(regression()), Kept()
            batch, more = (
                ([x, y], [weights]) if wrap is not weft.DistributedModel else (own(x, y), own(weights))
            )
            model.compile(optimizers.SGD(0.05), kinds(reduction=reduction), jit_compile=False)
            model.fit(
                *batch, sample_weight=None if given is None else more[0], batch_size=len(batch[0]) // 2, epochs=2,
                shuffle=False, verbose=0, callbacks=[kept],
            )  # fmt: skip
            if reduction == "sum":  # as often as they are evaluated, without a word between replicas
                model.evaluate(*batch, batch_size=len(batch[0]) // 2, verbose=0, callbacks=[kept])
            found.append((kept.told, model.get_weights()))
        (told, values), (own_told, own_values) = found
        for one, other in zip(own_values, values, strict=True):
            near(one, other, f"{reduction}: weights", 1e-4)
        alike(own_told, told, reduction)


class Held(keras.Model):
    """A plain class of Keras that holds the model, with a loop body of its own."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.error = keras.metrics.RootMeanSquaredError(name="error")
        self.one_step = weft.step(self.microbatch) if hasattr(net, "all_variables") else self.alone
        self.ask = weft.step(self.net) if hasattr(net, "all_variables") else self.net

    def microbatch(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = self.net(x, training=True)
            loss = tf.reduce_mean((predictions - y) ** 2)
        return tape.gradient(loss, self.net.trainable_variables), predictions

    def alone(self, x: Any, y: Any) -> Any:
        gradients, predictions = self.microbatch(x, y)
        return [weft.StepOutput([each]) for each in gradients], weft.StepOutput([predictions])

    def train_step(self, data: Any) -> Any:
        x, y = data
        gradients, predictions = self.one_step(x, y)
        means = [each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(means, self.net.trainable_variables, strict=True))
        self.error.update_state(y, predictions.merge())
        return {"error": self.error.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        found = self.ask(x)
        self.error.update_state(y, found.merge() if hasattr(found, "merge") else found)
        return {"error": self.error.result()}


@check
def a_plain_class_that_holds_a_split_model(_: int) -> None:
    """Its callbacks are told the numbers of all replicas, and decide alike."""
    x, y, more_x, more_y = numbers()
    told = []
    for wrap in (lambda net: net, weft.DistributedModel):
        model, kept = Held(wrap(regression())), Kept()
        given = [x, y, more_x[:8], more_y[:8]]
        given = own(*given) if wrap is weft.DistributedModel else given
        stop = keras.callbacks.EarlyStopping("val_error", patience=0, mode="min")
        model.compile(optimizers.SGD(0.1), jit_compile=False)
        model.fit(
            *given[:2], batch_size=len(given[0]) // 2, epochs=7, shuffle=False, verbose=0, callbacks=[kept, stop],
            validation_data=tuple(given[2:]), validation_batch_size=8,
        )  # fmt: skip
        told.append(kept.told)
    alike(told[1], told[0], "fit")


@check
def a_number_that_is_none(_: int) -> None:
    """In the data of one copy: all end."""
    x, y, _, _ = numbers()
    x[12] = np.nan
    model = weft.DistributedModel(regression())
    model.compile(optimizers.SGD(0.1), "mse", jit_compile=False)
    stop, kept = keras.callbacks.TerminateOnNaN(), Kept()
    given = own(x, y)
    model.fit(*given, batch_size=2, epochs=3, shuffle=False, verbose=0, callbacks=[stop, kept])
    assert [name for name, _ in kept.told] == ["batch 0", "batch 1", "batch 2", "batch 3", "epoch 0"], (
        kept.told
    )


if __name__ == "__main__":
    check.work(begin)
