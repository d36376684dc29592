"""A run that saves itself, and faults at steps of it; started by `test_restarts.py`.

    restarting.py FOLDER STEPS [--partitions COUNT] [--faults JSON] [--asynchronous]

Faults are by attempt: [[rank, step], ...]; a rank kills itself with SIGKILL in that step of that attempt. Each step
appends `step loss shift` to FOLDER/losses-ATTEMPT-RANK. The end writes a checksum of this rank's variables, as far as
copies share them, to FOLDER/end-RANK.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from weft.tensorflow.session.session import is_here


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--faults", type=json.loads, default=[])
    parser.add_argument("--asynchronous", action="store_true")
    options = parser.parse_args()
    attempt = int(os.environ.get("WEFT_ATTEMPT", "0"))

    weft.init({"partitions": options.partitions, "microbatches": 2, "ddp": True})
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.BatchNormalization(),
              keras.layers.Dropout(0.3), keras.layers.Dense(8), keras.layers.Dense(3)]  # fmt: skip
    model = weft.DistributedModel(keras.Sequential(layers))
    optimizer = keras.optimizers.Adam(0.01)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    counter, noise = tf.Variable(0.0), tf.random.Generator.from_seed(weft.rdp_rank())
    tf.random.set_global_generator(noise)

    @weft.step
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def train_step(x, y):
        found, loss = gradients(x, y)
        averaged = [each.accumulate() for each in found]
        optimizer.apply_gradients(zip(averaged, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    data = np.random.default_rng(weft.rdp_rank())
    x, y = data.normal(size=(28, 6)).astype("float32"), data.integers(0, 3, 28)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(28).batch(4).prefetch(2)
    random.seed(weft.rdp_rank())
    np.random.seed(weft.rdp_rank())
    fault = options.faults[attempt] if attempt < len(options.faults) else None
    also = {"counter": counter}
    with weft.checkpoints(
        options.folder / "saves", every=5, optimizer=optimizer, also=also, asynchronous=options.asynchronous
    ) as run:
        for x, y in run.batches(dataset, steps=options.steps):
            shift = (
                random.random()
                + float(np.random.random())
                + float(noise.uniform(()))
                + float(keras.random.uniform(()))
            )
            loss = float(train_step(x + shift * 0.01, y))
            counter.assign_add(1.0)
            with open(options.folder / f"losses-{attempt}-{weft.rank()}", "a") as file:
                file.write(f"{run.step} {loss.hex()} {shift.hex()}\n")
            if fault == [weft.rank(), run.step]:
                os.kill(os.getpid(), signal.SIGKILL)
    assert run.step == float(counter) == int(optimizer.iterations)
    digest = hashlib.sha256()
    for each in model.all_variables():
        if is_here(each) and (each.trainable or weft.rdp_rank() == 0):
            digest.update(each.path.encode() + tf.convert_to_tensor(each).numpy().tobytes())
    (options.folder / f"end-{weft.rank()}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
