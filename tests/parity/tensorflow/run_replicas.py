"""Two copies of a model that is split in two, each with half of the batch, beside plain Keras with all of it.

weft run -n 4 tests/parity/tensorflow/run_replicas.py NAME ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.run_checks import near
from tests.parity.worker import arguments, work

L, optimizers = keras.layers, keras.optimizers
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


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
def embeddings() -> None:
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
def embeddings_in_fit() -> None:
    x = words()
    y = x.sum(1, keepdims=True) / 20
    found = []
    for each, batch in ((sums(), (x, y)), (weft.DistributedModel(sums()), own(x, y))):
        each.compile(OPTIMIZERS["AdamW, clipped by norms"](), "mse", jit_compile=False)
        each.fit(*batch, batch_size=len(batch[0]), epochs=3, shuffle=False, verbose=0)
        found.append(each.get_weights())
    for at, (expected, value) in enumerate(zip(*found, strict=True)):
        near(value, expected, f"variable {at}", 1e-4)


def run(name: str, _: int) -> tuple[str, dict[str, Any]]:
    """A check raises if something is wrong."""
    CHECKS[name]()
    return "", {}


if __name__ == "__main__":
    work(arguments(list(CHECKS)), run, begin)
