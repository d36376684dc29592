"""What the workers of this folder have in common: their checks by name, a small model, steps, and comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.run_cases import difference
from tests.parity.worker import arguments, work

Check = Callable[[int], None]
L = keras.layers
M = 4


def begin(partitions: int, **settings: Any) -> None:
    weft.init({"partitions": partitions, "microbatches": M, **settings})


def build(seed: int = 3, layers: int = 4, dropout: float = 0.0) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    parts = [L.Input((6,))]
    for _ in range(layers):
        parts += [L.Dense(8, "tanh"), L.Dropout(dropout)]
    return keras.Sequential([*parts, L.Dense(3)])


def data(rows: int = 8, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=(rows, 6)), tf.float32), tf.constant(rng.integers(0, 3, rows))


def loss_of(labels: Any, predictions: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True))


def parts(*tensors: Any, count: int = M) -> list[tuple[Any, ...]]:
    return list(zip(*(tf.split(each, count) for each in tensors), strict=True))


def near(one: Any, other: Any, what: str, tolerance: float = 1e-5) -> None:
    found = difference(one, other)
    assert found <= tolerance, f"{what} differs by {found:.1e}: {str(one)[:200]} and {str(other)[:200]}"


def place(model: Any) -> dict[int, int]:
    return {id(variable): number for number, variable in enumerate(model.module.trainable_variables)}


def same_gradients(model: Any, gradients: Any, expected: list[Any], what: str = "a gradient") -> None:
    """``gradients``: of this rank's variables; ``expected``: of all."""
    numbers = place(model)
    own = [numbers[id(variable)] for variable in model.trainable_variables]
    assert len(gradients) == len(own), (len(gradients), len(own))
    for gradient, number in zip(gradients, own, strict=True):
        mean = gradient.accumulate() if isinstance(gradient, weft.StepOutput) else gradient
        near(tf.convert_to_tensor(mean), expected[number], f"{what} of variable {number}")


def plain_gradients(model: Any, x: Any, y: Any, change: Callable[[list[Any]], list[Any]] = list) -> list[Any]:
    """The mean over microbatches in one process; ``change``: what the step does with each microbatch's gradients."""
    found = []
    for a, b in parts(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(b, model(a, training=True))
        found.append(change(tape.gradient(loss, model.trainable_variables)))
    return [tf.add_n(list(each)) / M for each in zip(*found, strict=True)]


def refuses(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return
    raise AssertionError(f"{text!r} was not raised")


def step_of(model: Any) -> Any:
    """A step that gives the gradients of a model's variables."""

    @weft.step
    def step(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(b, model(a, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return step


def rank_of(partitions: int) -> int:
    """This rank's number, when weft is initialised."""
    begin(partitions)
    return weft.rank()


class Checks(dict[str, Check]):
    """The checks of a worker by name: `check = Checks()`, `@check` before each, `check.work()` at the end."""

    def __call__(self, function: Check) -> Check:
        self[function.__name__] = function
        return function

    def of_each(self, *names: str) -> Callable[[Callable[[str, int], None]], None]:
        """Make a check of a function for each of ``names``, which it is called with."""

        def register(function: Callable[[str, int], None]) -> None:
            self.update({f"{function.__name__}[{name}]": functools.partial(function, name) for name in names})

        return register

    def work(self, start: Callable[[int], int] = rank_of) -> None:
        """Run those that the command line names; one raises if something is wrong."""

        def run(name: str, partitions: int) -> tuple[str, dict[str, Any]]:
            self[name](partitions)
            return "", {}

        work(arguments(list(self)), run, start)
