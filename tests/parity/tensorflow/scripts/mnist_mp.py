"""Digits on a model that is split, as public scripts for smdistributed.modelparallel train them; the data is made.

mnist_mp.py [--horovod 1] [--gradients tape|get_gradients ...]
"""

import argparse
import json

import numpy as np
import smdistributed.modelparallel.tensorflow as smp
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--horovod", type=int, default=0)
parser.add_argument("--gradients", nargs="+", default=["get_gradients"])
args, _ = parser.parse_known_args()

cfg = {
    "microbatches": 2,
    "placement_strategy": "cluster",
    "pipeline": "1f1b",
    "optimize": "memory",
    "contiguous": True,
    "xla": False,
    "fork": False,
    "horovod": bool(args.horovod),
}
smp.init(cfg)
if args.horovod:
    import horovod.tensorflow as hvd

noise = np.random.default_rng(1)
digits = noise.normal(size=(10, 12, 12, 1)).astype("float32")
y_train = noise.integers(0, 10, 128)
x_train = digits[y_train] + 0.3 * noise.normal(size=(128, 12, 12, 1)).astype("float32")
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train))
if args.horovod:
    train_ds = train_ds.shard(smp.dp_size(), smp.dp_rank())
train_ds = train_ds.batch(16 // smp.dp_size(), drop_remainder=True)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super(MyModel, self).__init__()
        self.conv1 = tf.keras.layers.Conv2D(4, 3, activation="relu")
        self.flatten = tf.keras.layers.Flatten()
        self.d1 = tf.keras.layers.Dense(16, activation="relu")
        self.d2 = tf.keras.layers.Dense(10)

    def first(self, x):
        with smp.partition(0):
            x = self.conv1(x)
            return self.flatten(x)

    def call(self, x):
        x = self.first(x)
        with smp.partition(smp.pp_size() - 1):
            x = self.d1(x)
            return self.d2(x)


def train(gradients):
    tf.keras.utils.set_random_seed(5)
    model = MyModel()
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
    train_loss = tf.keras.metrics.Mean(name="train_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    entered = []

    @smp.register_post_partition_hook
    def test_eager():
        entered.append(tf.executing_eagerly() and model.partitioned)

    @smp.step
    def get_grads(images, labels):
        if gradients == "tape":
            with tf.GradientTape() as tape:
                predictions = model(images, training=True)
                loss = loss_object(labels, predictions)
            grads = tape.gradient(loss, model.trainable_variables)
        else:
            predictions = model(images, training=True)
            loss = loss_object(labels, predictions)
            grads = optimizer.get_gradients(loss, model.trainable_variables)
        return grads, loss, predictions

    @tf.function
    def train_step(images, labels, first_batch):
        gradients, loss, predictions = get_grads(images, labels)
        if args.horovod:
            gradients = [hvd.allreduce(g.accumulate()) for g in gradients]
        else:
            gradients = [g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if args.horovod and first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        train_loss(loss.reduce_mean())
        train_accuracy(labels, predictions.merge())
        return loss.reduce_mean()

    losses = []
    for batch, (images, labels) in enumerate(train_ds):
        value = train_step(images, labels, tf.constant(batch == 0))
        losses.append(float(hvd.allreduce(value)) if args.horovod else float(value))
    assert entered == [True], entered
    whole = float(train_loss.result()), float(train_accuracy.result())
    everywhere = smp.allgather(whole, smp.MP_GROUP)
    assert len(set(everywhere)) == 1, everywhere
    smp.core.barrier()
    if smp.mp_size() > 1:
        assert len(model.trainable_variables) < len(model.all_variables())
    return losses, whole


for gradients in args.gradients:
    losses, whole = train(gradients)
    print("RESULT", json.dumps([smp.rank(), smp.dp_rank(), gradients, losses, whole]))
