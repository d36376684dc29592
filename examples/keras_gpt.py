"""A small GPT in Keras, split over two processes, learns the source of Python's standard library, byte by byte."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers
from parts.python_source import read_source

import weft.tensorflow as weft

WIDTH, HEADS, BLOCKS, CONTEXT, BATCH, STEPS = 64, 4, 4, 64, 16, 60


class Block(layers.Layer):
    """Self-attention and a perceptron, each added to what goes in. Shape [batch, length, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        self.perceptron = keras.Sequential([layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)])

    def call(self, x, training=None):
        inside = self.norms[0](x)
        x = x + self.attention(inside, inside, use_causal_mask=True, training=training)
        return x + self.perceptron(self.norms[1](x))


class GPT(keras.Model):
    """Bytes [batch, length] to logits [batch, length, 256]. Nothing in it knows that it may be split."""

    def __init__(self) -> None:
        super().__init__()
        self.token = layers.Embedding(256, WIDTH)
        self.place = layers.Embedding(CONTEXT, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(256)

    def call(self, ids, training=None):
        x = self.token(ids) + self.place(tf.range(CONTEXT))
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.norm(x))


keras.utils.set_random_seed(0)
weft.init({"partitions": 2, "microbatches": 4})
model = weft.DistributedModel(GPT())
optimizer = keras.optimizers.AdamW(3e-3, global_clipnorm=1.0)  # the norm is that of both ranks' gradients
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
text = tf.io.decode_raw(read_source(limit_bytes=500_000), tf.uint8)
pieces = tf.data.Dataset.from_tensor_slices(text).batch(CONTEXT + 1, drop_remainder=True)
batches = pieces.shuffle(4096, seed=0).batch(BATCH, drop_remainder=True)  # the same on both ranks


@weft.step
def get_grads(ids, targets):
    with tf.GradientTape() as tape:
        loss = loss_of(targets, model(ids, training=True))
    return tape.gradient(loss, model.trainable_variables), loss


@tf.function
def train_step(rows):
    gradients, loss = get_grads(tf.cast(rows[:, :-1], tf.int32), rows[:, 1:])
    means = [gradient.accumulate() for gradient in gradients]
    optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
    return loss.reduce_mean()


losses = [float(train_step(rows)) for rows in batches.take(STEPS)]
print(f"partition {weft.pp_rank()} has {len(model.trainable_variables)} variables")
if weft.rank() == 0:
    print(f"loss {losses[0]:.2f} in the first step, {losses[-1]:.2f} nats a byte after {STEPS}")
if not losses[-1] < 0.8 * losses[0]:
    raise SystemExit("the loss did not fall")
