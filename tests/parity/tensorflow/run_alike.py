"""Models that are alike, and one that follows another: each check compares with plain Keras in the same process.

weft run -n 2 tests/parity/tensorflow/run_alike.py NAME ...
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import Checks, begin, near
from tests.parity.tensorflow.run_keras import seeded, told

L = keras.layers
check = Checks()
TAU = 0.25


def follow(target: Any, model: Any, tau: float = TAU, kind: str = "variables") -> None:
    """As scripts have it: the target goes some way to the model."""
    for t, m in zip(getattr(target, kind), getattr(model, kind), strict=False):
        t.assign(tau * tf.convert_to_tensor(m) + (1 - tau) * tf.convert_to_tensor(t))


def dense(*sizes: int, built: bool = True) -> Any:
    return keras.Sequential(
        [*([keras.Input((6,))] if built else []), *[L.Dense(size, "tanh") for size in sizes]]
    )


def one_weight() -> Any:
    return keras.Sequential([keras.Input((6,)), L.Dense(6, use_bias=False)])


def convolutions() -> Any:
    a = keras.Input((6,))
    h = L.Reshape((6, 1))(a)
    for _ in range(3):
        h = L.BatchNormalization()(L.Conv1D(4, 3, padding="same")(h))
    return keras.Model(a, L.Dense(3)(L.Flatten()(h)))


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = L.Dense(8, "tanh"), L.LayerNormalization(), L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.c(self.b(self.a(x)))


class SplitNet(weft.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = L.Dense(8, "tanh"), L.LayerNormalization(), L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.c(self.b(self.a(x)))


Models = Sequence[Any]
Made = Callable[[], Models]


def wrapped(make: Made) -> Models:
    return [weft.DistributedModel(each) for each in make()]


def same(what: str, make: Made, loop: Callable[..., None], split_ones: Made | None = None) -> Models:
    """Loops over plain and over split models: the variables of this rank are those of one process."""
    gc.collect()  # models of the case before
    plain = seeded(make)
    loop(lambda f: f, lambda each: each, *plain)
    split = seeded(split_ones or (lambda: wrapped(make)))
    loop(weft.step, lambda each: each.accumulate(), *split)
    for number, (one, other) in enumerate(zip(plain, split, strict=True)):
        place = {id(each): at for at, each in enumerate(other.all_variables())}
        for each in other.variables:
            near(
                each, one.variables[place[id(each)]], f"{what}: variable {each.path} of model {number}", 1e-4
            )
    assert any(each.variables for each in split), what
    return split


def batches(count: int = 3) -> list[Any]:
    return [tf.random.stateless_normal([8, 6], [0, number]) for number in range(count)]


def learn(kind: str = "variables", graph: bool = False) -> Callable[..., None]:
    """A model learns what its target says, and the target follows."""

    def loop(step: Any, mean: Any, model: Any, target: Any) -> None:
        optimizer = keras.optimizers.Adam(0.05)

        @step
        def gradients_of(x: Any) -> Any:
            with tf.GradientTape() as tape:
                wanted = tf.stop_gradient(target(x[:, ::-1]))
                loss = tf.reduce_mean((model(x) - wanted) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        def train(x: Any) -> None:
            found = [None if each is None else mean(each) for each in gradients_of(x)]
            optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
            follow(target, model, TAU, kind)

        act = tf.function(train) if graph else train
        for x in batches():
            act(x)

    return loop


@check
def targets_in_the_same_step(partitions: int) -> None:
    begin(partitions)
    split = same("layers of one kind", lambda: [dense(8, 8, 8, 8, 8), dense(8, 8, 8, 8, 8)], learn())
    model, target = split
    assert len(model.variables) == len(target.variables) < 10
    same("a graph", lambda: [dense(8, 8, 8), dense(8, 8, 8)], learn(graph=True))
    same("weights", lambda: [convolutions(), convolutions()], learn("weights"))
    same("trainable weights", lambda: [convolutions(), convolutions()], learn("trainable_weights"))
    same("built in the step", lambda: [dense(8, 8, 8, built=False), dense(8, 8, 8, built=False)], learn())
    same("classes", lambda: [Net(), Net()], learn(), lambda: [SplitNet(), SplitNet()])
    same("a head more", lambda: [dense(8, 8, 8, 8), dense(8, 8, 8)], learn())  # as BYOL has it


def q_learning(early: bool) -> Callable[..., None]:
    """The model is split by a step that acts; its target is first called by another one."""

    def loop(step: Any, mean: Any, model: Any, target: Any) -> None:
        optimizer = keras.optimizers.SGD(0.1)

        @step
        def act(x: Any) -> Any:
            return model(x)

        @step
        def value(x: Any) -> Any:
            return target(x)

        @step
        def gradients_of(x: Any, wanted: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - wanted) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        if early:
            follow(target, model, 1.0)
        act(batches()[0])
        if not early:
            follow(target, model, 1.0)
        for x in batches():
            wanted = value(x)
            wanted = wanted.merge() if isinstance(wanted, weft.StepOutput) else wanted
            found = [mean(each) for each in gradients_of(x, wanted[:, ::-1])]
            optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
            follow(target, model)

    return loop


@check
def targets_of_other_steps(partitions: int) -> None:
    begin(partitions)
    for early in (True, False):
        split = same(
            f"values of a target ({early})", lambda: [dense(8, 8, 8, 8), dense(8, 8, 8, 8)], q_learning(early)
        )
        assert len(split[0].variables) == len(split[1].variables) < 8


@check
def twins_and_their_targets(partitions: int) -> None:
    begin(partitions)

    def loop(step: Any, mean: Any, one: Any, two: Any, target: Any, other: Any) -> None:
        optimizers = [keras.optimizers.Adam(0.05), keras.optimizers.Adam(0.05)]

        @step
        def gradients_of(x: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                wanted = tf.stop_gradient(tf.minimum(target(x[:, ::-1]), other(x[:, ::-1])))
                losses = [tf.reduce_mean((each(x) - wanted) ** 2) for each in (one, two)]
            return [
                tape.gradient(loss, each.trainable_variables)
                for loss, each in zip(losses, (one, two), strict=True)
            ]

        for x in batches():
            for model, follower, optimizer, found in zip(
                (one, two), (target, other), optimizers, gradients_of(x), strict=True
            ):
                optimizer.apply_gradients(zip(map(mean, found), model.trainable_variables, strict=True))
                follow(follower, model)

    same("two critics", lambda: [dense(8, 8, 8) for _ in range(4)], loop)


def both(first: Any, second: Any) -> str:
    """The warning for a step that calls one model after another."""

    @weft.step
    def step(x: Any) -> Any:
        return second(first(x))

    return told(lambda: step(batches()[0]))


@check
def what_cannot_be_split_alike_is_told(partitions: int) -> None:
    begin(partitions)
    first, second = (weft.DistributedModel(each) for each in seeded(lambda: [one_weight(), one_weight()]))
    words = both(first, second)
    assert len(first.variables) + len(second.variables) == 1, "a rank has no variables"
    model = weft.DistributedModel(seeded(lambda: dense(8, 8, 6)))
    copy = keras.models.clone_model(model.module)
    more = both(model, weft.DistributedModel(dense(7, 8)))
    if weft.rank() == 0:
        assert (
            f"{first.module.name} and {second.module.name} are alike, and their variables lie on different"
            in words
        ), words
        assert f"{copy.name} is alike to {model.module.name}, which is split" in more, more
        assert (
            "outside of a step pairs those of different layers, so update one from the other inside" in words
        )


if __name__ == "__main__":
    check.work()
