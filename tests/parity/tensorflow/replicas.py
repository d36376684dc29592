"""What two replicas average, add up and hand on: ``weft run -n 2 tests/parity/tensorflow/replicas.py``."""

from __future__ import annotations

import importlib.util

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow.data_parallel as dp
from weft.compat.tensorflow import horovod as hvd
from weft.errors import DivergenceError, UsageError
from weft.tensorflow import join
from weft.tensorflow.replicas.average import all_reduce, average, broadcast_from_first
from weft.tensorflow.session.session import session

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
NOISE = np.random.default_rng(0)
TOKENS = NOISE.integers(0, 20, (32, 3))
LABELS = NOISE.integers(0, 4, 32)


def fails(kind, text, run):
    try:
        run()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {text!r} was expected")


def net(seed):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((3,)),
            layers.Embedding(20, 6),
            layers.Flatten(),
            layers.Dense(8, "relu"),
            layers.Dense(4),
        ]
    )


def batch(number, rank, size):
    rows = slice(8 * number + rank, 8 * number + 8, size)
    return tf.constant(TOKENS[rows]), tf.constant(LABELS[rows])


def train_whole(dense=False):
    """Losses and weights of one process with the whole batch, without weft; `dense`: with gradients that are dense."""
    model, optimizer = net(7), keras.optimizers.Adam(0.05)

    @tf.function
    def step(tokens, labels):
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(tokens))
        gradients = tape.gradient(loss, model.trainable_variables)
        # Keras 3 squares gradients by rows before it adds up rows that repeat.
        if dense:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [float(step(*batch(number, 0, 1))) for number in range(4)]
    return [*losses, *(float(tf.reduce_sum(each.value)) for each in model.variables)]


def train(style, in_graph, compression=dp.Compression.none, names=dp, **options):
    """The same of replicas; they begin with weights of their own, and get the first one's."""
    options["compression"] = compression
    model = net(7 + dp.rank())
    dp.broadcast_variables(model.variables, root_rank=0)
    optimizer = keras.optimizers.Adam(0.05)
    if style == "optimizer":
        assert names.DistributedOptimizer(optimizer, **options) is optimizer

    def step(tokens, labels):
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(tokens))
        if style == "tape":
            tape = names.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, model.trainable_variables)
        if style == "allreduce":
            count = len(gradients)
            gradients = [
                dp.allreduce(each, param_index=at, num_params=count) for at, each in enumerate(gradients)
            ]
        if style == "each":
            gradients = [names.allreduce(each) for each in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return dp.oob_allreduce(loss)

    if in_graph:
        step = tf.function(step)
    losses = [float(step(*batch(number, dp.rank(), dp.size()))) for number in range(4)]
    return [*losses, *(float(tf.reduce_sum(each.value)) for each in model.variables)]


def check_training():
    whole, dense = train_whole(), train_whole(dense=True)
    assert whole != train("none", True) and not np.allclose(whole, dense, rtol=1e-3)
    for style, in_graph, options in (
        ("tape", False, {}),
        ("tape", True, {}),
        ("optimizer", True, {}),
        ("allreduce", True, {}),
        ("tape", True, {"names": hvd}),
        ("optimizer", True, {"names": hvd}),
        ("each", False, {"names": hvd}),
    ):
        found = train(style, in_graph, **options)
        assert np.allclose(found, whole, rtol=1e-5, atol=1e-6), (style, in_graph, options, found, whole)
    for style, names in (("tape", dp), ("optimizer", hvd)):
        found = train(style, True, names=names, sparse_as_dense=True)
        assert np.allclose(found, dense, rtol=1e-5, atol=1e-6), (style, found, dense)
    found = train("tape", True, dp.Compression.fp16)
    assert found != whole and np.allclose(found, whole, rtol=1e-3), (found, whole)


def check_operations():
    rank = dp.rank()
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        given = [tf.cast(tf.fill((3, 5), rank + 1.0), dtype), tf.cast(2 * rank, dtype)]
        eager = average(given, session())
        inside = tf.function(lambda *tensors: average(tensors, session()))
        for found in (eager, inside(*given)):
            assert [each.dtype for each in found] == [dtype, dtype]
            assert np.all(found[0].numpy().astype("float64") == 1.5) and float(found[1]) == 1.0
        assert inside.get_concrete_function(*given).outputs[0].shape == (3, 5)
    rows = tf.IndexedSlices(
        tf.ones((rank * 2, 2)), tf.constant([1, 1][: rank * 2], tf.int32), tf.constant([3, 2])
    )
    for found in (average([rows], session())[0], tf.function(lambda: average([rows], session())[0])()):
        assert found.values.numpy().tolist() == [[0.5, 0.5]] * 2 and found.indices.numpy().tolist() == [1, 1]
        assert tf.convert_to_tensor(found).numpy().tolist() == [[0, 0], [1, 1], [0, 0]]
    whole = tf.IndexedSlices(tf.constant([rank + 1]), tf.constant([rank], tf.int64), tf.constant([3]))
    added = hvd.allreduce(whole, average=False)
    assert added.dtype == tf.int32 and tf.convert_to_tensor(added).numpy().tolist() == [1, 2, 0]
    assert dp.oob_allreduce(whole, op=dp.ReduceOp.MAX).numpy().tolist() == [1, 2, 0]
    half = tf.IndexedSlices(tf.ones((1, 2)) * rank, tf.constant([2]), tf.constant([3, 2]))
    found = dp.oob_allreduce(half, dp.Compression.fp16)
    assert found.dtype == tf.float32 and found.values.numpy().tolist() == [[0, 0], [0.5, 0.5]]
    mixed = average([tf.ones(3) * rank, tf.ones((2, 2), tf.float64) * rank, tf.zeros((0, 4))], session())
    assert [each.numpy().sum() for each in mixed] == [1.5, 2.0, 0.0] and mixed[2].shape == (0, 4)
    for op, found in (("SUM", [1, 11]), ("MIN", [0, 5]), ("MAX", [1, 6])):
        assert dp.oob_allreduce(tf.constant([rank, rank + 5]), op=dp.ReduceOp[op]).numpy().tolist() == found
    assert float(dp.allreduce(grad=tf.constant(float(rank)), param_index=1, num_params=2)) == 0.5
    assert float(dp.oob_allreduce(tf.constant(float(rank)), dp.Compression.fp16)) == 0.5
    assert int(dp.broadcast(tf.constant(rank * 10), 1)) == 10
    assert int(dp.broadcast(tf.constant(rank, tf.uint32), 1)) == 1
    assert dp.broadcast(tf.constant([rank == 1, rank == 0]), 1).numpy().tolist() == [True, False]
    assert dp.overlap(7) == 7
    with tf.GradientTape() as tape:
        x = tf.constant(2.0 + rank)
        tape.watch(x)
        y = x * all_reduce(x, "sum", session())
    # Of x_r (x_0 + x_1), added up over the replicas r: the sum stands there twice, once for each factor.
    assert float(tape.gradient(y, x)) == (2.0 + 3.0) + (2.0 + 3.0)


def check_settings():
    """A repeated init changes how averages are taken."""
    values = np.random.default_rng(2).normal(size=(2, 1000)).astype("float32")
    for settings, error in (
        ({"compression": "int8"}, 1e-2),
        ({"compression": "fp16"}, 1e-3),
        ({"all_reduce": "shared"}, 0.0),
        ({"all_reduce": "direct"}, 0.0),
        ({"deterministic": True}, 0.0),
    ):
        join.init(settings)
        (found,) = average([tf.constant(values[dp.rank()])], session())
        most = float(np.abs(found.numpy() - values.sum(0) / 2).max())
        assert (most > 0) == (error > 0) and most <= error * np.abs(values).max(), (settings, most)
    join.init()


def check_failures():
    """An error in a graph is one of TensorFlow's; what it was is known, and the job does not go on."""
    graph = tf.function(lambda tensor: average([tensor], session()), autograph=False)
    fails(tf.errors.OpError, "average different tensors", lambda: graph(tf.ones(2 + dp.rank())))
    assert isinstance(session().failure, DivergenceError)
    fails(UsageError, "the job cannot go on", lambda: average([tf.ones(2)], session()))


def check_variables():
    rank = dp.rank()
    plain, of_keras = tf.Variable([float(rank)]), keras.Variable(np.ones(3) * rank)
    counter, seed = tf.Variable(rank, dtype=tf.int64), keras.random.SeedGenerator(rank).state
    every = [plain, of_keras, counter, seed]

    @tf.function
    def hand_on(first):
        if first:
            dp.broadcast_variables(every, root_rank=1)
        return plain.read_value()

    assert hand_on(tf.constant(True)).numpy().tolist() == [1.0]
    assert of_keras.numpy().sum() == 3 and int(counter) == 1 and int(seed.value[0]) == 1
    plain.assign([float(rank)])
    broadcast_from_first([plain], session())
    assert plain.numpy().tolist() == [0.0]


def check_sessions_of_tensorflow_1():
    with tf.Graph().as_default():
        value = tf.compat.v1.get_variable("value", initializer=float(dp.rank()) + 3.0)
        optimizer = dp.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
        train_op = optimizer.minimize(value * (dp.rank() + 1.0))
        hook = dp.BroadcastGlobalVariablesHook(1)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as running:
            assert running.run(value) == 4.0
            running.run(train_op)
            assert running.run(value) == 4.0 - 0.5 * 1.5


def check_keras_2():
    """Optimizers of ``tf_keras``, where it is installed."""
    if importlib.util.find_spec("tf_keras") is None:
        return
    import tf_keras

    for kind in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        variable, optimizer = tf.Variable([1.0, 2.0]), dp.DistributedOptimizer(kind(0.5))
        optimizer.apply_gradients([(tf.constant([2.0 * dp.rank(), 4.0]), variable)])
        assert variable.numpy().tolist() == [0.5, 0.0]


def check_fit():
    model = net(3 + dp.rank())
    model.compile(dp.DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS, jit_compile=False)
    callbacks = [dp.keras.BroadcastGlobalVariablesCallback(0), dp.keras.MetricAverageCallback()]
    rows = slice(dp.rank(), 32, dp.size())
    told = model.fit(TOKENS[rows], LABELS[rows], 4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    everything = [*told.history["loss"], *(float(tf.reduce_sum(each.value)) for each in model.variables)]
    assert float(all_reduce(tf.constant(everything), "max", session())[0]) == np.float32(everything[0])
    means = all_reduce(tf.constant(everything, tf.float64), "average", session())
    assert np.allclose(means, everything, rtol=1e-6)
    assert type(model.optimizer).__name__ == "SGD" and int(model.optimizer.iterations) == 8


def check_errors():
    fails(UsageError, "init() called more than once", dp.init)
    tape = tf.GradientTape()
    fails(UsageError, "device_dense", lambda: dp.DistributedGradientTape(tape, device_dense="/cpu:0"))
    fails(UsageError, "ReduceOp.SUM is not", lambda: dp.DistributedGradientTape(tape, op=dp.ReduceOp.SUM))
    fails(UsageError, "op is 'sum'", lambda: dp.oob_allreduce(1.0, op="sum"))
    fails(UsageError, "takes an optimizer", lambda: dp.DistributedOptimizer(net(1)))
    fails(UsageError, "param_index is 2", lambda: dp.allreduce(tf.ones(1), 2, 2))
    fails(UsageError, "takes one gradient", lambda: dp.allreduce(param_index=0, num_params=1))
    fails(UsageError, "the ranks are 0 to 1", lambda: dp.broadcast(tf.ones(1), 2))
    fails(UsageError, "is for graphs of TensorFlow 1", dp.broadcast_global_variables)
    fails(UsageError, "is of int32: cast it", lambda: average([tf.constant(1)], session()))
    fails(UsageError, "is no int32", lambda: dp.oob_allreduce(tf.constant(1)))
    fails(UsageError, "has the operations", lambda: all_reduce(tf.ones(1), "product", session()))


def main():
    dp.init()
    check_training()
    check_operations()
    check_settings()
    check_variables()
    check_sessions_of_tensorflow_1()
    check_fit()
    check_keras_2()
    check_errors()
    check_failures()
    print("passed", flush=True)


if __name__ == "__main__":
    main()
