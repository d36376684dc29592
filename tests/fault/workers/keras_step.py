"""A small Keras model, trained over two ranks; the argument says what goes wrong on rank 1 at step 3."""

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft

what = sys.argv[1]
weft.init({"partitions": 2, "microbatches": 4, "wait_timeout": 60.0})
keras.utils.set_random_seed(0)
bad = weft.rank() == 1
steps = [0]


class Bad(keras.layers.Layer):
    def call(self, x):
        def run(value):
            if bad and steps[0] == 3:
                if what == "kill":
                    os.kill(os.getpid(), 9)
                if what == "layer":
                    raise ValueError("this layer has had enough")
                if what == "slow":
                    time.sleep(2)
            return value

        y = tf.py_function(run, [x], x.dtype)
        y.set_shape(x.shape)
        return y


width = 9 if bad and what == "graphs" else 8
model = weft.DistributedModel(
    keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.Dense(width),
            Bad(),
            keras.layers.Dense(3),
        ]
    )
)
optimizer = keras.optimizers.SGD(0.1)


@weft.step
def gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        )
    return tape.gradient(loss, model.trainable_variables), loss


@tf.function
def train(x, y):
    found, loss = gradients(x, y)
    optimizer.apply_gradients(
        zip([each.accumulate() for each in found], model.trainable_variables, strict=True)
    )
    return loss.reduce_mean()


random = np.random.default_rng(0)
for step in range(6):
    steps[0] = step
    if bad and step == 3 and what == "script":
        raise RuntimeError("a fault in the script")
    rows = 4 if bad and step == 3 and what == "batch" else 8
    x, y = random.normal(size=(rows, 6)), random.integers(0, 3, rows)
    if bad and step == 3 and what == "data":
        x = x + 1.0
    train(tf.constant(x, tf.float32), tf.constant(y))
print("trained", flush=True)
