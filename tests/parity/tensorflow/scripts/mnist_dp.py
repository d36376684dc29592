"""Digits on data parallel processes, as public scripts for smdistributed.dataparallel train them; the data is made."""

import json

import numpy as np
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf

tf.keras.utils.set_random_seed(42)
sdp.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[sdp.local_rank()], "GPU")

noise = np.random.default_rng(1)
digits = noise.normal(size=(10, 12, 12)).astype("float32")
mnist_labels = noise.integers(0, 10, 128)
mnist_images = digits[mnist_labels] + 0.3 * noise.normal(size=(128, 12, 12)).astype("float32")

dataset = tf.data.Dataset.from_tensor_slices(
    (mnist_images[..., tf.newaxis], tf.cast(mnist_labels, tf.int64)),
)
dataset = dataset.shard(sdp.size(), sdp.rank()).repeat().batch(16 // sdp.size())

mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(16, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.01)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    tape = sdp.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))

    if first_batch:
        sdp.broadcast_variables(mnist_model.variables, root_rank=0)
        sdp.broadcast_variables(opt.variables(), root_rank=0)

    loss_value = sdp.oob_allreduce(loss_value)
    return loss_value


losses = []
for batch, (images, labels) in enumerate(dataset.take(8)):
    loss_value = training_step(images, labels, batch == 0)
    losses.append(float(loss_value))

weights = [float(tf.reduce_sum(tf.abs(each))) for each in mnist_model.variables]
print("RESULT", json.dumps([sdp.rank(), sdp.size(), losses, weights]))
