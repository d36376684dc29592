"""Trains models split, and in this one process, and compares.

weft run -n 2 tests/parity/tensorflow/run_cases.py NAME ...
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.models import CASES, Case, usual_loss
from tests.parity.worker import BeforeSplit, arguments, work

STEPS = 3
MICROBATCHES = 4


def optimizer(case: Case) -> Any:
    made = keras.optimizers.SGD(case.rate, momentum=0.9)
    if case.policy == "mixed_float16":
        made = keras.optimizers.LossScaleOptimizer(made, initial_scale=128.0)
    return made


def build(case: Case) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy(case.policy)
    return case.build()


def batches(case: Case) -> list[Any]:
    rng = np.random.default_rng(3)
    return [tf.nest.map_structure(tf.constant, case.batch(rng)) for _ in range(STEPS)]


def gradients(case: Case, model: Any, variables: Any, opt: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
    loss_of = case.loss or usual_loss
    with tf.GradientTape() as tape:
        loss, found = loss_of(model, x, y)
        scaled = opt.scale_loss(loss)
    return tape.gradient(scaled, variables()), loss, found


def one_process(case: Case) -> tuple[list[float], list[np.ndarray], list[np.ndarray], Any]:
    """Losses, the last step's gradients and all variables of plain TensorFlow, microbatch after microbatch."""
    model, opt = build(case), optimizer(case)
    step = tf.function(lambda x, y: gradients(case, model, lambda: model.trainable_variables, opt, x, y))
    losses, mean, found = [], [], None
    for x, y in batches(case):
        parts = [
            step(*tf.nest.map_structure(lambda t, i=i: tf.split(t, MICROBATCHES)[i], (x, y)))
            for i in range(MICROBATCHES)
        ]
        losses.append(float(np.mean([float(loss) for _, loss, _ in parts])))
        mean = [
            None if each[0] is None else mean_of(each)
            for each in zip(*(part[0] for part in parts), strict=True)
        ]
        found = tf.nest.map_structure(lambda *each: tf.concat(each, 0), *(part[2] for part in parts))
        opt.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    grads = [
        np.zeros(1) if g is None else np.asarray(tf.cast(tf.convert_to_tensor(g), tf.float64)) for g in mean
    ]
    return losses, grads, [np.asarray(tf.cast(v, tf.float64)) for v in model.variables], found


def split(case: Case, whole: bool) -> tuple[list[float], list[Any], list[Any], Any, Any]:
    inner, opt = build(case), optimizer(case)
    model = weft.DistributedModel(inner)

    @weft.step
    def step(x: Any, y: Any) -> Any:
        return gradients(case, model, lambda: model.trainable_variables, opt, x, y)

    def train(x: Any, y: Any) -> Any:
        grads, loss, found = step(x, y)
        mean = [None if g is None else g.accumulate() for g in grads]
        opt.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        merged = tf.nest.map_structure(lambda each: each.merge(), found)
        return [tf.convert_to_tensor(g) for g in mean if g is not None], loss.reduce_mean(), merged

    train = tf.function(train) if whole else train
    losses, mean, found = [], [], None
    for x, y in batches(case):
        mean, loss, found = train(x, y)
        losses.append(float(loss))
    return losses, mean, model.variables, found, model


def mean_of(gradients: Any) -> Any:
    """The mean of microbatches' gradients; rows of all of them, where there are rows."""
    if not isinstance(gradients[0], tf.IndexedSlices):
        return tf.add_n(list(gradients)) / MICROBATCHES
    values = tf.concat([each.values for each in gradients], 0) / MICROBATCHES
    return tf.IndexedSlices(
        values, tf.concat([each.indices for each in gradients], 0), gradients[0].dense_shape
    )


def difference(one: Any, other: Any, least: float = 1e-3) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape:
        return float("inf")
    if not one.size:
        return 0.0
    return float(np.max(np.abs(one - other)) / max(least, float(np.max(np.abs(other)))))


def compare(
    name: str, partitions: int, executor: str = "graph", whole: bool = True
) -> tuple[str, dict[str, Any]]:
    """What differs between the model split and the model in one process; and more for the item's line."""
    case = CASES[name]()
    try:
        losses, grads, variables, predictions = one_process(case)
    except Exception as broken:
        raise BeforeSplit(f"not trained in one process: {broken!r}") from broken
    weft.init({"partitions": partitions, "microbatches": MICROBATCHES, "executor": executor, **case.settings})
    own_losses, own_grads, own_variables, own_predictions, model = split(case, whole)
    everything = model.all_variables()
    scale = 1e-1 * max(
        float(np.max(np.abs(each))) for each in grads
    )  # a bias before a BatchNorm has none but noise
    place = {id(variable): number for number, variable in enumerate(everything)}
    trainable = {id(variable): number for number, variable in enumerate(model.module.trainable_variables)}
    present = [
        v for v in model.trainable_variables if grads[trainable[id(v)]].shape != (1,) or v.shape == (1,)
    ]
    worst = {"losses": max(map(difference, own_losses, losses))}
    for variable in own_variables:
        found = difference(tf.cast(variable, tf.float64), variables[place[id(variable)]])
        worst[f"variable {variable.path}"] = found
    for gradient, variable in zip(own_grads, present, strict=True):
        found = difference(tf.cast(gradient, tf.float64), grads[trainable[id(variable)]], scale)
        worst[f"gradient of {variable.path}"] = found
    pairs = zip(tf.nest.flatten(own_predictions), tf.nest.flatten(predictions), strict=True)
    for one, other in pairs:
        worst["predictions"] = difference(tf.cast(one, tf.float64), tf.cast(other, tf.float64))
    faults = [
        f"{what} differs by {value:.1e}" for what, value in worst.items() if not value <= case.tolerance
    ]
    if len(everything) != len(variables):
        faults.append(f"{len(everything)} variables, one process has {len(variables)}")
    used = [v for v in everything if model.owner_of(v) is not None]  # what no step uses is on every rank
    own = {id(v) for v in own_variables}
    owned = [place[id(v)] for v in used if id(v) in own]
    every = [place[id(v)] for v in used]
    return "\n".join(faults), {"worst": max(worst.values()), "owned": owned, "every": every}


def begin(partitions: int) -> int:
    """This rank's number, when weft is initialised for TensorFlow."""
    weft.init({"partitions": partitions, "microbatches": MICROBATCHES})
    return weft.rank()


def run_case(name: str, partitions: int) -> tuple[str, dict[str, Any]]:
    """A case by its name; "NAME/eager" runs without a `tf.function` around, "NAME/calls" by the other executor."""
    case, _, way = name.partition("/")
    return compare(case, partitions, "eager" if way == "calls" else "graph", not way)


if __name__ == "__main__":
    work(arguments([f"{name}{way}" for name in CASES for way in ("", "/eager", "/calls")]), run_case, begin)
