"""What test_notebook.py runs: a notebook's process, which has used TensorFlow, and a function with its own flow."""

from __future__ import annotations

import keras
import tensorflow as tf

import weft.tensorflow as weft

network = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])


def loss_of(predictions):
    loss = tf.reduce_mean(predictions**2)
    if loss > 100.0:  # which AutoGraph takes from the source
        loss = loss / 2.0
    return loss


def train(steps, x):
    weft.init({"partitions": 2, "microbatches": 2})
    model = weft.DistributedModel(network)
    optimizer = keras.optimizers.SGD(0.1)

    @weft.step
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def train_step(x):
        found, loss = gradients(x)
        optimizer.apply_gradients(
            zip([each.accumulate() for each in found], model.trainable_variables, strict=True)
        )
        return loss.reduce_mean()

    @tf.function
    def halved(value):
        while value > 1.0:
            value = value / 2.0
        return value

    losses = [train_step(x) for _ in range(steps)]
    return losses, halved(tf.constant(12.0)), tf.function(loss_of)(tf.constant([20.0])), weft.pp_size()


if __name__ == "__main__":
    losses, halved, alone, partitions = weft.notebook_run(
        train, 2, tf.ones((4, 4)), options=["--device", "cpu"]
    )
    assert losses[1] < losses[0], losses
    assert (float(halved), float(alone), partitions) == (0.75, 200.0, 2)
    print("as expected")
