"""`fit` that saves itself, and faults at steps of it; started by `test_restarts.py`.

    fitting.py FOLDER [--partitions COUNT] [--faults JSON] [--data dataset|arrays|endless] [--stop EPOCH]

Faults are by attempt: [[rank, step], ...]; a rank kills itself with SIGKILL after that step of that attempt. Each step
appends `step loss accuracy` to FOLDER/losses-ATTEMPT-RANK, and each epoch `epoch loss accuracy` with those of the
validation to FOLDER/epochs-ATTEMPT-RANK. The end writes this rank's variables to FOLDER/end-RANK.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from weft.tensorflow.session.session import is_here

ROWS, BATCH, EPOCHS = 28, 4, 3


class Told(keras.callbacks.Callback):
    """Writes down what Keras tells, and ends the process or the training."""

    def __init__(self, options: Any, run: Any) -> None:
        super().__init__()
        self.attempt = int(os.environ.get("WEFT_ATTEMPT", "0"))
        self.options, self.run, self.noted = options, run, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.noted = self.run.step

    def tell(self, name: str, *words: Any) -> None:
        with open(self.options.folder / f"{name}-{self.attempt}-{weft.rank()}", "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.run.step == self.noted:
            return  # drawn again, not trained
        self.noted = self.run.step
        self.tell("losses", self.noted, float(logs["loss"]).hex(), float(logs["accuracy"]).hex())
        faults = self.options.faults
        if self.attempt < len(faults) and faults[self.attempt] == [weft.rank(), self.noted]:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.tell("epochs", epoch, *(float(logs[name]).hex() for name in sorted(logs)))
        if epoch == self.options.stop:
            self.model.stop_training = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--faults", type=json.loads, default=[])
    parser.add_argument("--data", default="dataset")
    parser.add_argument("--stop", type=int)
    options = parser.parse_args()

    weft.init({"partitions": options.partitions, "microbatches": 2, "ddp": True})
    keras.utils.set_random_seed(weft.rdp_rank())
    layers = [keras.layers.Input((6,)), keras.layers.Dense(16, activation="tanh")]
    if options.partitions > 1:  # copies get the moving averages of the first one
        layers.append(keras.layers.BatchNormalization())
    layers += [keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = weft.DistributedModel(keras.Sequential(layers))
    model.compile(
        keras.optimizers.Nadam(0.01, use_ema=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    data = np.random.default_rng(weft.rdp_rank())
    x, y = data.normal(size=(ROWS, 6)).astype("float32"), data.integers(0, 3, ROWS)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS)
    given: dict[str, Any] = {
        "dataset": {"x": dataset.batch(BATCH).prefetch(2)},
        "arrays": {"x": x, "y": y, "batch_size": BATCH},
        "endless": {"x": dataset.repeat().batch(BATCH), "steps_per_epoch": ROWS // BATCH},
    }[options.data]
    run = weft.checkpoints(options.folder / "saves", every=5)
    history = model.fit(
        **given, epochs=EPOCHS, verbose=0, validation_data=(x, y), callbacks=[run, Told(options, run)]
    ).history
    if history:
        last = {name: values[-1].hex() for name, values in sorted(history.items())}
        (options.folder / f"history-{weft.rank()}").write_text(json.dumps(last))
    end = {
        each.path: tf.convert_to_tensor(each).numpy().tobytes().hex()
        for each in model.all_variables()
        if is_here(each)
    }
    (options.folder / f"end-{weft.rank()}").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
