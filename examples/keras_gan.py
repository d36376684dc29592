"""A GAN in Keras: a plain `keras.Model` that holds two split models, each with an optimizer of its own."""

import keras
import tensorflow as tf

import weft.tensorflow as weft

keras.utils.set_random_seed(0)
weft.init({"partitions": 2, "microbatches": 2})
LOSS = keras.losses.BinaryCrossentropy(from_logits=True)


def network(*sizes):
    return weft.DistributedModel(keras.Sequential([keras.layers.Dense(size, "tanh") for size in sizes]))


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.make, self.judge = network(16, 16, 4), network(16, 16, 1)
        self.judged, self.made = keras.metrics.Mean(name="judged"), keras.metrics.Mean(name="made")
        self.judging = weft.step(self.judging_step)
        self.making = weft.step(self.making_step)

    def compile(self, judge_optimizer, make_optimizer):
        super().compile()
        self.judge_optimizer, self.make_optimizer = judge_optimizer, make_optimizer

    def judging_step(self, real, noise):
        with tf.GradientTape() as tape:
            true, false = self.judge(real), self.judge(self.make(noise))
            loss = LOSS(tf.ones_like(true), true) + LOSS(tf.zeros_like(false), false)
        return tape.gradient(loss, self.judge.trainable_variables), loss

    def making_step(self, noise):
        with tf.GradientTape() as tape:
            false = self.judge(self.make(noise))
            loss = LOSS(tf.ones_like(false), false)
        return tape.gradient(loss, self.make.trainable_variables), loss

    def train_step(self, real):
        noise = tf.random.stateless_normal([8, 3], [0, 1])
        for step, given, model, optimizer, mean in (
            (self.judging, (real, noise), self.judge, self.judge_optimizer, self.judged),
            (self.making, (noise,), self.make, self.make_optimizer, self.made),
        ):
            gradients, loss = step(*given)
            means = [gradient.accumulate() for gradient in gradients]
            optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
            mean.update_state(loss.reduce_mean())
        return {"judged": self.judged.result(), "made": self.made.result()}


gan = Gan()
gan.compile(keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-3))
data = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal([32, 4], [0, 2])).batch(
    8, drop_remainder=True
)
history = gan.fit(data, epochs=15, verbose=0).history
if weft.rank() == 0:
    print(*(f"{name} {values[0]:.3f} to {values[-1]:.3f}" for name, values in sorted(history.items())))
assert history["judged"][-1] < history["judged"][0], "the loss of the judge does not fall"
