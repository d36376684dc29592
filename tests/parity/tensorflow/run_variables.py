"""Variables that get their values on their owner only: which rank makes what, and that it is what one process makes.

weft run -n 2 tests/parity/tensorflow/run_variables.py NAME ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import (
    Checks,
    begin,
    data,
    near,
    place,
    plain_gradients,
    same_gradients,
    step_of,
)

L = keras.layers
check = Checks()
WIDTH = 16
LAYERS = 5


def build(with_input: bool) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    first = [L.Input((6,))] if with_input else []
    return keras.Sequential([*first, *(L.Dense(WIDTH, "tanh") for _ in range(LAYERS)), L.Dense(3)])


@contextmanager
def counted() -> Iterator[list[int]]:
    """The elements of each kernel that is made inside."""
    found: list[int] = []
    kind = keras.initializers.VarianceScaling
    original = kind.__call__

    def call(self: Any, shape: Any, dtype: Any = None) -> Any:
        if tf.executing_eagerly():
            found.append(int(np.prod(shape)))
        return original(self, shape, dtype)

    kind.__call__ = call
    try:
        yield found
    finally:
        kind.__call__ = original


def train(model: Any, plain: Any, made: list[int]) -> None:
    """Three steps, the first of which makes the values, beside one process."""
    x, y = data()
    first, second = (keras.optimizers.Adam(0.01) for _ in range(2))
    step = step_of(model)
    for _ in range(3):
        expected = plain_gradients(plain, x, y)
        found = [each.accumulate() for each in step(x, y)]
        same_gradients(model, found, expected)
        first.apply_gradients(zip(expected, plain.trainable_variables, strict=True))
        second.apply_gradients(zip(found, model.trainable_variables, strict=True))
    numbers = place(model)
    own = model.trainable_variables
    for variable in own:
        near(variable, plain.trainable_variables[numbers[id(variable)]], variable.path)
    kernels = sorted(int(np.prod(each.shape)) for each in own if len(each.shape) == 2)
    assert sorted(made) == kernels, (made, kernels)
    assert 0 < len(own) < len(plain.trainable_variables)


@check
def of_a_model_that_is_built_before(partitions: int) -> None:
    begin(partitions, verify="off")  # what is made for the comparison does not count
    plain = build(True)
    with counted() as made:
        with weft.delay_param_initialization():
            net = build(True)
        assert not made, made
        train(weft.DistributedModel(net), plain, made)


@check
def of_a_model_that_the_first_step_builds(partitions: int) -> None:
    begin(partitions, verify="off")
    plain = build(False)
    plain(data()[0])
    with counted() as made:
        train(weft.DistributedModel(build(False)), plain, made)


@check
def that_are_read_before(partitions: int) -> None:
    """Whoever reads a variable before the first step gets its value; so does a saved one that is loaded."""
    begin(partitions)
    plain = build(True)
    with weft.delay_param_initialization():
        net = build(True)
    model = weft.DistributedModel(net)
    near(model.all_variables()[0], plain.variables[0], "a kernel that is read")
    changed = 2.0 * plain.variables[2]
    for each in (net, plain):
        each.variables[2].assign(changed)
    x, y = data()
    step = step_of(model)
    same_gradients(model, step(x, y), plain_gradients(plain, x, y))
    own = {id(variable) for variable in model.variables}
    for variable in model.all_variables():
        if id(variable) not in own:
            try:
                variable.numpy()
            except tf.errors.FailedPreconditionError as error:
                assert "a variable of partition" in str(error), error
            else:
                raise AssertionError(f"{variable.path} of another rank was read")


@check
def whose_initialisers_have_a_state(partitions: int) -> None:
    """Their values are made in the program's order, on every rank, as one process has them."""
    begin(partitions)

    def made() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        seeds = keras.random.SeedGenerator(11)
        parts = [
            L.Dense(8, "tanh", kernel_initializer=keras.initializers.RandomNormal(seed=seeds))
            for _ in range(2)
        ]
        own = [
            L.Dense(8, kernel_initializer=lambda shape, dtype=None: tf.random.normal(shape)) for _ in range(2)
        ]
        return keras.Sequential([L.Input((6,)), *parts, *own, L.Dense(3)])

    plain = made()
    with weft.delay_param_initialization():
        model = weft.DistributedModel(made())
    x, y = data()
    step = step_of(model)
    same_gradients(model, step(x, y), plain_gradients(plain, x, y))


if __name__ == "__main__":
    check.work()
