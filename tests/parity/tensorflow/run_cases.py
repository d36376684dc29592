"""Trains models split, and in this one process, and compares: ``weft run -n 2 tests/parity/tensorflow/run_cases.py NAME ...``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.models import CASES, Case, usual_loss

STEPS = 3
MICROBATCHES = 4


def optimizer(case: Case) -> Any:
    made = keras.optimizers.SGD(0.05, momentum=0.9)
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
            None if each[0] is None else tf.add_n([tf.convert_to_tensor(g) for g in each]) / MICROBATCHES
            for each in zip(*(part[0] for part in parts), strict=True)
        ]
        found = tf.nest.map_structure(lambda *each: tf.concat(each, 0), *(part[2] for part in parts))
        opt.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    grads = [np.zeros(1) if g is None else np.asarray(tf.cast(g, tf.float64)) for g in mean]
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
        return [g for g in mean if g is not None], loss.reduce_mean(), merged

    train = tf.function(train) if whole else train
    losses, mean, found = [], [], None
    for x, y in batches(case):
        mean, loss, found = train(x, y)
        losses.append(float(loss))
    return losses, mean, model.variables, found, model


def difference(one: Any, other: Any, least: float = 1e-3) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if one.shape != other.shape:
        return float("inf")
    if not one.size:
        return 0.0
    return float(np.max(np.abs(one - other)) / max(least, float(np.max(np.abs(other)))))


def compare(name: str, partitions: int, executor: str, whole: bool) -> dict[str, Any]:
    case = CASES[name]()
    weft.init(
        {"partitions": partitions, "microbatches": MICROBATCHES, "executor": executor, **case.settings}
    )
    began = time.perf_counter()
    losses, grads, variables, predictions = one_process(case)
    middle = time.perf_counter()
    own_losses, own_grads, own_variables, own_predictions, model = split(case, whole)
    took = time.perf_counter() - middle
    worst = {"loss": max(map(difference, own_losses, losses))}
    everything = model.all_variables()
    scale = 1e-1 * max(float(np.max(np.abs(each))) for each in grads)  # a bias before a BatchNorm has none but noise
    place = {id(variable): number for number, variable in enumerate(everything)}
    trainable = [v for v in model.module.trainable_variables]
    train_place = {id(variable): number for number, variable in enumerate(trainable)}
    reference = {i: v for i, v in enumerate(variables)}
    assert len(everything) == len(variables), (len(everything), len(variables))
    worst["variables"] = max(
        (difference(tf.cast(v, tf.float64), reference[place[id(v)]]) for v in own_variables), default=0.0
    )
    present = [
        v for v in model.trainable_variables if not np.array_equal(grads[train_place[id(v)]], np.zeros(1))
    ]
    worst["gradients"] = max(
        (
            difference(tf.cast(g, tf.float64), grads[train_place[id(v)]], scale)
            for g, v in zip(own_grads, present, strict=True)
        ),
        default=0.0,
    )
    worst["predictions"] = max(
        map(
            lambda a, b: difference(tf.cast(a, tf.float64), tf.cast(b, tf.float64)),
            tf.nest.flatten(own_predictions),
            tf.nest.flatten(predictions),
        )
    )
    return {
        "case": name, "rank": weft.rank(), "own": len(own_variables), "all": len(everything), "worst": worst,
        "good": all(value <= case.tolerance for value in worst.values()),
        "one_s": round(middle - began, 1), "split_s": round(took, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--partitions", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--executor", default="graph")
    parser.add_argument("--eagerly", action="store_true", help="without a tf.function around the step")
    options = parser.parse_args()
    for name in options.cases:
        found = compare(name, options.partitions, options.executor, not options.eagerly)
        print("RESULT " + json.dumps(found), flush=True)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
