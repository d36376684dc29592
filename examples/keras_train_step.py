"""A Keras model with a `train_step` of its own, which calls a step of weft."""

import keras
import tensorflow as tf

import weft.tensorflow as weft

keras.utils.set_random_seed(0)
weft.init({"partitions": 2, "microbatches": 2})


class Net(weft.DistributedModel):
    def __init__(self):
        super().__init__()
        self.body = [keras.layers.Dense(16, "tanh") for _ in range(3)]
        self.head = keras.layers.Dense(1)
        self.error = keras.metrics.Mean(name="error")
        self.one_step = weft.step(self.microbatch)

    def call(self, x, training=False):
        for layer in self.body:
            x = layer(x, training=training)
        return self.head(x, training=training)

    def microbatch(self, x, y):  # runs once for each microbatch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(y - self(x, training=True)))
        return tape.gradient(loss, self.trainable_variables), loss

    def train_step(self, data):
        gradients, loss = self.one_step(*data)
        means = [each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
        self.error.update_state(loss.reduce_mean())
        return {"error": self.error.result()}


x = keras.random.normal((64, 8), seed=0)
net = Net()
net.compile(keras.optimizers.Adam(1e-2), jit_compile=False)
history = net.fit(x, keras.ops.sum(x, -1, keepdims=True), batch_size=16, epochs=3, verbose=0).history
first, *_, last = history["error"]
print(f"rank {weft.rank()}: error {first:.3f} to {last:.3f}")
assert last < first, "the error does not fall"
