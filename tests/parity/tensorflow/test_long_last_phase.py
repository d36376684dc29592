"""A rank of TensorFlow was said to wait while it computed.

ConvNeXt on two slow processes trained to its end, and was then broken off: "rank 1 left at step 3 while rank 0 still
needs it: step 3, microbatch 0, wait". Rank 0 had got its last gradient long before, and was in the backward pass.
Inside of a graph nobody said so: only phases that are recorded tell that they begin. So whatever took longer, after the
last message of a job, than the two seconds that a message may be on its way ended that job.
"""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.launching import run_ranks  # noqa: E402
from tests.long import long  # noqa: E402
from tests.parity.tensorflow.jobs import WARM  # noqa: E402
from weft.watch.judge import LEAVE_SECONDS  # noqa: E402

SCRIPT = """
import sys, time
import keras
import tensorflow as tf
import weft.tensorflow as weft

weft.init({"partitions": 2, "microbatches": 1, "auto_partition": False, "default_partition": 0})

@tf.custom_gradient
def slow_backward(x):
    def gradient(upstream):
        def sleep(value):
            time.sleep(float(sys.argv[1]))
            return value
        slept = tf.py_function(sleep, [upstream], tf.float32)
        slept.set_shape(upstream.shape)
        return slept
    return tf.identity(x), gradient

class Slow(keras.layers.Layer):
    def call(self, x):
        return slow_backward(x)

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.layers.Dense(4), Slow()])
        self.last = keras.layers.Dense(1)

    def call(self, x):
        x = self.first(x)
        with weft.partition(1):
            return self.last(x)

model = weft.DistributedModel(Model())

@weft.step
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    return tape.gradient(loss, model.trainable_variables), loss

train_step(tf.ones([2, 4]))
print("owned", weft.rank(), len(model.trainable_variables))
"""


@long
def test_a_last_phase_that_takes_longer_than_a_message() -> None:
    outcome = run_ranks(2, SCRIPT, [str(3 * LEAVE_SECONDS)], warm=WARM).check()
    assert "owned 0 2" in outcome.stdout and "owned 1 2" in outcome.stdout
