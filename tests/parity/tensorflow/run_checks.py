"""What a step may contain and return, split over ranks: each check compares with plain TensorFlow in the same process.

weft run -n 2 tests/parity/tensorflow/run_checks.py NAME ...
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import weft.tensorflow as weft
from tests.parity.tensorflow.harness import (
    Checks,
    M,
    begin,
    build,
    data,
    loss_of,
    near,
    parts,
    place,
    plain_gradients,
    refuses,
    same_gradients,
    step_of,
)
from weft.errors import ConfigError, PlacementError, SplitError, UsageError

L = keras.layers
check = Checks()


@check
def gradients_by_tf_gradients(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    expected = plain_gradients(build(), x, y)
    model = weft.DistributedModel(build())

    @weft.step
    def step(a: Any, b: Any) -> Any:
        loss = loss_of(b, model(a, training=True))
        return tf.gradients(loss, [variable.value for variable in model.trainable_variables])

    same_gradients(model, step(x, y), expected)


@check
def clipping_inside(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    expected = plain_gradients(build(), x, y, lambda found: tf.clip_by_global_norm(found, 0.1)[0])
    one_each = plain_gradients(build(), x, y, lambda found: [tf.clip_by_norm(each, 0.05) for each in found])
    model = weft.DistributedModel(build())

    @weft.step
    def step(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(b, model(a, training=True))
        found = tape.gradient(loss, model.trainable_variables)
        clipped, norm = tf.clip_by_global_norm(found, 0.1)
        return clipped, [tf.clip_by_norm(each, 0.05) for each in found], norm

    clipped, each, norm = step(x, y)
    same_gradients(model, clipped, expected, "a clipped gradient")
    same_gradients(model, each, one_each, "a gradient clipped by itself")
    assert len(norm.outputs) == M


@check
def clipping_outside(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    whole = plain_gradients(build(), x, y)
    expected, norm = tf.clip_by_global_norm(whole, 0.1)
    model = weft.DistributedModel(build())
    step = step_of(model)
    own = [each.accumulate() for each in step(x, y)]
    for name, function in {
        "weft's": weft.clip_by_global_norm,
        "TensorFlow's": tf.clip_by_global_norm,
    }.items():
        found, total = function(own, 0.1)
        near(total, norm, f"the norm by {name}")
        same_gradients(model, found, expected, f"a gradient clipped by {name}")

    @tf.function
    def train(a: Any, b: Any) -> Any:
        return tf.clip_by_global_norm([each.accumulate() for each in step(a, b)], 0.1)

    found, total = train(x, y)
    near(total, norm, "the norm in a graph")
    same_gradients(model, found, expected, "a gradient clipped in a graph")


@check
def optimizers_that_clip(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    for options in ({"global_clipnorm": 0.1}, {"clipnorm": 0.05}, {"clipvalue": 0.01}):
        plain, model = build(), weft.DistributedModel(build())
        first, second = (keras.optimizers.SGD(0.1, momentum=0.9, **options) for _ in range(2))
        step = step_of(model)
        for _ in range(3):
            first.apply_gradients(zip(plain_gradients(plain, x, y), plain.trainable_variables, strict=True))
            found = [each.accumulate() for each in step(x, y)]
            second.apply_gradients(zip(found, model.trainable_variables, strict=True))
        numbers = place(model)
        for variable in model.trainable_variables:
            near(
                variable, plain.trainable_variables[numbers[id(variable)]], f"{variable.path} with {options}"
            )
        own = {variable.shape for variable in second.variables}
        assert len(second.variables) < len(first.variables), (len(second.variables), own)


@check
def wrong_pairs_are_refused(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    model = weft.DistributedModel(build())
    step = step_of(model)
    found = [each.accumulate() for each in step(x, y)]
    variables = model.trainable_variables
    if len(variables) > 1:
        refuses(
            UsageError, "is that of another variable",
            lambda: keras.optimizers.SGD(0.1).apply_gradients(zip(found, variables[::-1], strict=True)),
        )  # fmt: skip


@check
def two_models(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    first, second = build(1), build(2)
    losses = [
        loss_of(b, first(a, training=True) + 0.5 * second(a * 2.0, training=True)) for a, b in parts(x, y)
    ]
    one, other = weft.DistributedModel(build(1)), weft.DistributedModel(build(2))

    @weft.step
    def step(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(b, one(a, training=True) + 0.5 * other(a * 2.0, training=True))
        found = tape.gradient(loss, {"one": one.trainable_variables, "other": other.trainable_variables})
        return loss, found

    loss, found = step(x, y)
    near(loss.reduce_mean(), np.mean(losses), "the loss")
    for name, model in {"one": one, "other": other}.items():
        assert len(found[name]) == len(model.trainable_variables)
    held = len(one.trainable_variables) + len(other.trainable_variables)
    assert 0 < held < len(first.trainable_variables) + len(second.trainable_variables)


@check
def gradients_of_what_another_step_has_given_away(partitions: int) -> None:
    """A step asks for the gradients of a model that it does not call, and whose variables lie on both ranks already."""
    begin(partitions)
    x, y = data()
    first, second = build(1), build(2)
    one, other = weft.DistributedModel(build(1)), weft.DistributedModel(build(2))

    def step_of_both(model: Any) -> Any:
        @weft.step
        def step(a: Any, b: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(b, model(a, training=True))
            return tape.gradient(loss, [*one.trainable_variables, *other.trainable_variables])

        return step

    for model, plain in ((one, first), (other, second)):
        found = step_of_both(model)(x, y)
        own = [variable for each in (one, other) for variable in each.trainable_variables]
        assert len(found) == len(own), (len(found), len(own))
        numbers, expected = place(model), plain_gradients(plain, x, y)
        for gradient, variable in zip(found, own, strict=True):
            at = numbers.get(id(variable))
            assert (gradient is None) == (at is None), variable.path
            if at is not None:
                near(gradient.accumulate(), expected[at], variable.path)


@check
def a_model_that_follows_its_gradient(partitions: int) -> None:
    """An adversarial step: the gradient for the input goes into the model again."""
    begin(partitions)
    x, y = data()

    def attack(model: Any, a: Any, b: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(a)
                loss = loss_of(b, model(a, training=True))
            moved = a + 0.1 * tf.sign(tape.gradient(loss, a))
            total = loss + loss_of(b, model(tf.stop_gradient(moved), training=True))
        return total, outer.gradient(total, model.trainable_variables)

    plain = build()
    pairs = [attack(plain, tf.identity(a), b) for a, b in parts(x, y)]
    expected = [tf.add_n(list(each)) / M for each in zip(*(found for _, found in pairs), strict=True)]
    model = weft.DistributedModel(build())
    step = weft.step(lambda a, b: attack(model, a, b))
    loss, found = step(x, y)
    near(loss.reduce_mean(), np.mean([total for total, _ in pairs]), "the loss")
    same_gradients(model, found, expected)


@check
def what_a_step_returns(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    plain = build()
    predictions = [plain(a, training=True) for a, _ in parts(x, y)]
    losses = [loss_of(b, p) for p, (_, b) in zip(predictions, parts(x, y), strict=True)]
    model = weft.DistributedModel(build())

    @weft.step
    def step(a: Any, b: Any) -> Any:
        found = model(a, training=True)
        return {"loss": loss_of(b, found), "all": (found, [tf.argmax(found, -1)]), "words": "text", "none": None,
                "number": 7, "input": b}  # fmt: skip

    found = step(x, y)
    near(found["loss"].reduce_mean(), np.mean(losses), "reduce_mean")
    near(found["loss"].reduce_sum(), np.sum(losses), "reduce_sum")
    near(found["loss"].accumulate("accumulate_n"), np.mean(losses), "accumulate")
    near(
        found["loss"].accumulate("variable", tf.Variable(0.0)), np.mean(losses), "accumulate into a variable"
    )
    near(found["loss"].stack(), np.stack(losses), "stack")
    near(found["loss"].concat(), np.stack(losses), "concat of numbers")
    logits, (best,) = found["all"]
    near(logits.merge(), tf.concat(predictions, 0), "merge")
    near(logits.concat(), tf.concat(predictions, 0), "concat")
    near(logits.stack(), tf.stack(predictions), "stack of rows")
    near(best.concat(), tf.argmax(tf.concat(predictions, 0), -1), "whole numbers")
    assert found["words"] == ["text"] * M and found["number"] == [7] * M and found["none"] is None
    near(found["input"].concat(), y, "an argument that is handed back")
    refuses(UsageError, "a step returns a StepOutput", lambda: found["loss"] + 1.0)


@check
def evaluation_and_new_shapes(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    plain, model = build(dropout=0.5), weft.DistributedModel(build(dropout=0.5))

    train, traces = step_of(model), []

    @weft.step
    def evaluate(a: Any, scale: float) -> Any:
        traces.append(scale)
        return model(a, training=False) * scale

    train(x, y)
    for a, _ in parts(x, y):
        plain(a, training=True)
    for rows in (8, 16, 8):
        other, _ = data(rows, seed=rows)
        for scale in (1.0, 2.0, 1.0):
            near(
                evaluate(other, scale).merge(), plain(other, training=False) * scale, f"{rows} rows x {scale}"
            )
    assert sorted(traces) == [1.0, 1.0, 2.0, 2.0], traces


@check
def a_signature_of_unknown_size(partitions: int) -> None:
    begin(partitions)
    model, plain = weft.DistributedModel(build()), build()
    traces = []

    @weft.step
    def evaluate(a: Any) -> Any:
        traces.append(1)
        return model(a, training=False)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float32)])
    def outer(a: Any) -> Any:
        return evaluate(a).merge()

    for rows in (8, 16, 4):
        other, _ = data(rows, seed=rows)
        near(outer(other), plain(other, training=False), f"{rows} rows")
    assert len(traces) == 1
    told = weft.step(evaluate.function, input_signature=[tf.TensorSpec([None, 6], tf.float32)])
    for rows in (8, 16):
        other, _ = data(rows, seed=rows)
        near(told(other).merge(), plain(other, training=False), f"{rows} rows by a signature")
    assert len(traces) == 2
    refuses(UsageError, "a is float32[8, 5], but input_signature says", lambda: told(tf.zeros([8, 5])))


@check
def tensors_of_the_function_around(partitions: int) -> None:
    """A step that uses a tensor of the `tf.function` that calls it, by its name alone."""
    begin(partitions)
    x, y = data()
    plain, model = build(), weft.DistributedModel(build())

    @tf.function(reduce_retracing=False)
    def outer(a: Any, scale: Any) -> Any:
        double = 2.0 * scale
        step = steps.setdefault(
            "step", weft.step(lambda part: model(part, training=False) * holder["double"])
        )
        holder["double"] = double
        return step(a).merge()

    steps: dict[str, Any] = {}
    holder: dict[str, Any] = {}
    near(outer(x, tf.constant(1.5)), plain(x, training=False) * 3.0, "the first trace")
    near(outer(x, tf.constant([2.0])), plain(x, training=False) * 4.0, "another trace")
    near(outer(x, tf.constant(2.5)), plain(x, training=False) * 5.0, "the first trace again")


@check
def conditions_of_python(partitions: int) -> None:
    """Python's own conditions and loops over tensors become operations, in the step and in the model."""
    begin(partitions)
    x, y = data()
    plain, model = build(), weft.DistributedModel(build())

    def body(net: Any, a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            found = net(a, training=True)
            loss = loss_of(b, found)
            if loss > 1.1:
                loss = 2.0 * loss
            for _ in tf.range(2):
                loss += 0.1 * tf.reduce_mean(found**2)
        return loss, tape.gradient(loss, net.trainable_variables)

    reference = tf.function(lambda a, b: body(plain, a, b))
    pairs = [reference(a, b) for a, b in parts(x, y)]
    loss, found = weft.step(lambda a, b: body(model, a, b))(x, y)
    near([float(each) for each in loss.outputs], [float(each) for each, _ in pairs], "the losses")
    expected = [tf.add_n(list(each)) / M for each in zip(*(each for _, each in pairs), strict=True)]
    same_gradients(model, found, expected)


@check
def arguments_of_other_kinds(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    plain, model = build(), weft.DistributedModel(build())
    bias = tf.constant([0.1, 0.2, 0.3])
    late = tf.stack([x, 2.0 * x], 0)

    @weft.step(non_split_inputs=["bias"], input_split_axes={"late": 1})
    def step(batch: Any, bias: Any, late: Any, *, flag: bool) -> Any:
        found = model(batch["x"], training=False) + bias + tf.reduce_sum(late[0] + late[1], 1, keepdims=True)
        return found if flag else -found

    found = step({"x": x.numpy(), "y": y}, bias, late, flag=True)
    near(found.merge(), plain(x, training=False) + bias + tf.reduce_sum(3.0 * x, 1, keepdims=True), "a batch")
    near(step({"x": x, "y": y}, bias, late, flag=False).merge(), -found.merge(), "another flag")


@check
def uneven_batches(partitions: int) -> None:
    begin(partitions)
    x, y = data(7)
    plain = build()
    with tf.GradientTape() as tape:
        loss = loss_of(y, plain(x, training=True))
    expected = tape.gradient(loss, plain.trainable_variables)
    model = weft.DistributedModel(build())

    def body(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(b, model(a, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    refuses(SplitError, "a has 7 samples, which 4 microbatches do not divide", lambda: weft.step(body)(x, y))
    refuses(SplitError, "do not have the same batch size", lambda: weft.step(body)(x, y[:4]))
    uneven = weft.step(body, allow_uneven=True)
    for rows in (7, 2):
        found, gradients = uneven(x[:rows], y[:rows])
        if rows == 7:
            near(found.reduce_mean(), loss, "the loss")
            same_gradients(model, gradients, expected)
        else:
            assert len(found.outputs) == 2


@check
def placed_by_hand(partitions: int) -> None:
    begin(partitions, auto_partition=False, default_partition=partitions - 1)

    class Model(weft.DistributedModel):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [L.Dense(8, "tanh", name=f"part{i}") for i in range(4)]
            self.last = L.Dense(3, name="last")

        def call(self, x: Any) -> Any:
            for number, part in enumerate(self.parts):
                with weft.partition(number % partitions):
                    x = part(x)
            return self.last(x)

    keras.utils.set_random_seed(5)
    model = Model()
    x, y = data()
    step = step_of(model)
    found = step(x, y)
    own = {variable.path.split("/")[-2] for variable in model.trainable_variables}
    expected = {f"part{i}" for i in range(4) if i % partitions == weft.pp_rank()}
    expected |= {"last"} if weft.pp_rank() == partitions - 1 else set()
    assert own == expected, (own, expected)
    keras.utils.set_random_seed(5)
    plain = keras.Sequential([L.Dense(8, "tanh") for _ in range(4)] + [L.Dense(3)])
    gradients = plain_gradients(plain, x, y)
    numbers = {f"part{i}": 2 * i for i in range(4)} | {"last": 8}
    for variable, gradient in zip(model.trainable_variables, found, strict=True):
        at = numbers[variable.path.split("/")[-2]] + ("bias" in variable.path)
        near(gradient.accumulate(), gradients[at], variable.path)

    def outside() -> None:
        with weft.partition(partitions):
            pass

    refuses(PlacementError, f"weft.partition({partitions})", outside)


@check
def other_schedules(partitions: int) -> None:
    x, y = data()
    expected = plain_gradients(build(layers=6), x, y)
    for settings in (
        {"pipeline": "gpipe"}, {"pipeline": "interleaved_1f1b"}, {"pipeline": "looped_bfs"}, {"pipeline": "list"},
        {"pipeline": "auto"}, {"optimize": "memory"}, {"active_microbatches": 1},
    ):  # fmt: skip
        begin(partitions, **settings)
        model = weft.DistributedModel(build(layers=6))
        step = step_of(model)
        same_gradients(model, step(x, y), expected, f"with {settings} a gradient")
    refuses(
        ConfigError,
        'microbatches is "auto", which weft.tensorflow does not decide',
        lambda: weft.init({"partitions": partitions, "microbatches": "auto"}),
    )
    refuses(
        ConfigError, "whose backward passes are split in two", lambda: begin(partitions, pipeline="zb_h1")
    )


@check
def a_loss_scale_that_all_ranks_share(partitions: int) -> None:
    """One rank's gradients overflow: every rank leaves the step out, and halves its scale."""
    begin(partitions)
    x, y = data()
    model = weft.DistributedModel(build())
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)

    @weft.step
    def step(a: Any, b: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(b, model(a, training=True)) * tf.reduce_mean(factor)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(a: Any, b: Any, factor: Any) -> None:
        found = [each.accumulate() for each in step(a, b, factor)]
        if weft.pp_rank() == 0:
            found = [each * tf.reduce_mean(factor) for each in found]
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

    train(x, y, tf.ones(8))
    before = [variable.numpy() for variable in model.trainable_variables]
    train(x, y, tf.fill([8], 1e20))  # 1e40 on the first rank only
    assert float(optimizer.dynamic_scale) == 32.0, float(optimizer.dynamic_scale)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        near(variable, old, f"{variable.path} after a step that is left out", 0.0)


@check
def variables_of_the_script(partitions: int) -> None:
    """Counters and metrics that a step changes are the same on every rank, and as in one process."""
    begin(partitions)
    x, y = data()
    plain, model = build(), weft.DistributedModel(build())
    counter, accuracy = tf.Variable(0), keras.metrics.SparseCategoricalAccuracy()
    expected = keras.metrics.SparseCategoricalAccuracy()

    @weft.step
    def step(a: Any, b: Any) -> Any:
        counter.assign_add(1)
        with tf.GradientTape() as tape:
            predictions = model(a, training=True)
            loss = loss_of(b, predictions)
        accuracy.update_state(b, predictions)
        return tape.gradient(loss, model.trainable_variables), tf.identity(counter)

    _, counts = step(x, y)
    for a, b in parts(x, y):
        expected.update_state(b, plain(a, training=True))
    assert counter.numpy() == M and [int(each) for each in counts.outputs] == list(range(1, M + 1))
    near(accuracy.result(), expected.result(), "the metric")


@check
def a_state_that_the_loss_reads(partitions: int) -> None:
    """A running mean that is written after the forward pass and read before the next one: microbatches follow it."""
    begin(partitions)
    x, y = data()
    plain, model = build(), weft.DistributedModel(build())

    def body(net: Any, mean: Any, a: Any, b: Any) -> Any:
        found = net(a * (1.0 + mean), training=True)
        loss = loss_of(b, found)
        mean.assign(0.5 * mean + 0.5 * loss)
        return loss

    own, other = tf.Variable(0.0), tf.Variable(0.0)
    expected = [float(body(plain, other, a, b)) for a, b in parts(x, y)]
    found = weft.step(lambda a, b: body(model, own, a, b))(x, y)
    near([float(each) for each in found.outputs], expected, "the losses")
    near(own, other, "the running mean")


@check
def values_of_other_ranks_are_not_read(partitions: int) -> None:
    begin(partitions)
    x, y = data()
    model = weft.DistributedModel(build())
    step = weft.step(lambda a, b: loss_of(b, model(a)))
    step(x, y)
    own = {id(variable) for variable in model.variables}
    for variable in model.all_variables():
        if id(variable) not in own:
            refuses(Exception, "a variable of partition", lambda variable=variable: variable.numpy())
    refuses(UsageError, "is called inside of a function that @weft.step decorates", lambda: model(x))


def same_fits(kit: Any, plain: Any, model: Any, x: Any, y: Any) -> None:
    """Two models of this Keras train, predict and evaluate alike."""
    histories = []
    for net in (plain, model):
        net.compile(
            kit.optimizers.Adam(0.01),
            kit.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        history = net.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x[:16], y[:16])
        )
        histories.append(history.history)
    for name, values in histories[0].items():
        near(histories[1][name], values, f"{name} of fit", 1e-4)
    near(model.predict(x, batch_size=8, verbose=0), plain(x, training=False), "predictions", 1e-4)
    found, expected = (
        net.evaluate(x, y, batch_size=8, verbose=0, return_dict=True) for net in (model, plain)
    )
    for name, value in expected.items():
        near(found[name], value, f"{name} of evaluate", 1e-4)


@check
def fit(partitions: int) -> None:
    begin(partitions)
    x, y = data(32)
    plain, model = build(), weft.DistributedModel(build())

    class Microbatches(keras.Model):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def call(self, a: Any, training: Any = None) -> Any:
            return self.net(a, training=training)

    other = Microbatches(plain)
    same_fits(keras, other, model, x, y)
    rest = [net.evaluate(x[:13], y[:13], batch_size=8, verbose=0, return_dict=True) for net in (model, other)]
    near(rest[0]["loss"], rest[1]["loss"], "the loss with a rest", 1e-4)
    refuses(UsageError, "steps_per_execution=2", lambda: model.compile("sgd", "mse", steps_per_execution=2))


@check
def keras_two(partitions: int) -> None:
    try:
        import tf_keras
    except ImportError:
        return
    begin(partitions)
    x, y = data()

    def made() -> Any:
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(4)
        layers = [tf_keras.layers.Dense(8, "tanh"), tf_keras.layers.BatchNormalization(), tf_keras.layers.Dense(8),
                  tf_keras.layers.Dense(3)]  # fmt: skip
        net = tf_keras.Sequential(layers)
        net.build((None, 6))
        return net

    plain, model = made(), weft.DistributedModel(made())
    first, second = (tf_keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1) for _ in range(2))
    step = step_of(model)
    for _ in range(3):
        expected = plain_gradients(plain, x, y)
        first.apply_gradients(zip(expected, plain.trainable_variables, strict=True))
        found = step(x, y)
        second.apply_gradients(
            zip([each.accumulate() for each in found], model.trainable_variables, strict=True)
        )
    numbers = place(model)
    for variable in model.trainable_variables:
        near(variable, plain.trainable_variables[numbers[id(variable)]], variable.name)
    assert len(model.trainable_variables) < len(plain.trainable_variables)


@check
def fit_of_keras_two(partitions: int) -> None:
    try:
        import tf_keras
    except ImportError:
        return
    begin(partitions)
    x, y = data(32)

    def made() -> Any:
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(4)
        regular = tf_keras.regularizers.L2(0.01)
        layers = [
            tf_keras.layers.Dense(8, "tanh"),
            tf_keras.layers.Dense(8, "relu", kernel_regularizer=regular),
        ]
        net = tf_keras.Sequential([*layers, tf_keras.layers.Dense(3)])
        net.build((None, 6))
        return net

    plain, model = made(), weft.DistributedModel(made())
    same_fits(tf_keras, plain, model, x, y)
    assert len(model.trainable_variables) < len(plain.trainable_variables)
    refuses(UsageError, "steps_per_execution=2", lambda: model.compile("sgd", "mse", steps_per_execution=2))


@check
def objects_between_ranks(partitions: int) -> None:
    begin(partitions)
    rank, size = weft.rank(), weft.size()
    own = {
        "rank": rank,
        "all": [tf.fill([2], rank), np.arange(3) + rank],
        "variable": tf.Variable([1.5 + rank]),
    }
    for number, found in enumerate(weft.allgather(own)):
        assert found["rank"] == number and tf.is_tensor(found["all"][0]), found
        near(found["all"][0], tf.fill([2], number), "a tensor")
        near(found["variable"], [1.5 + number], "a variable")
        assert (found["all"][1] == np.arange(3) + number).all()
    if rank == 0:
        weft.broadcast((True, tf.constant([True, False])), weft.WORLD)
        weft.send({"flags": tf.constant([1, 2])}, size - 1)
    else:
        said, flags = weft.recv_from(0)
        assert said is True and flags.numpy().tolist() == [True, False]
        if rank == size - 1:
            assert weft.recv_from(0)["flags"].numpy().tolist() == [1, 2]
    weft.barrier(weft.PP_GROUP)
    refuses(
        UsageError, "barrier() was called while a graph is traced", tf.function(weft.barrier, autograph=False)
    )
    step = weft.step(lambda a: (weft.allgather(1), a)[1])
    refuses(UsageError, "allgather() was called while a graph is traced", lambda: step(tf.ones([8])))


if __name__ == "__main__":
    check.work()
