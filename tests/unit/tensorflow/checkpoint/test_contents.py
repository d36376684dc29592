"""Names of variables, and whose slot an optimizer's variable is, for every kind of optimizer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from weft.tensorflow import private  # noqa: E402
from weft.tensorflow.checkpoint.contents import fit, name_variables, optimizer_state  # noqa: E402


def variables() -> list[Any]:
    """Of names that hold each other's, two of them the same."""
    keras.utils.clear_session()
    names = ("dense", "dense_1", "dense", "dense_1_more")
    return [keras.Variable([1.0, 2.0], name=name, trainable=True) for name in names]


NAMES = ["dense", "dense_1", "dense#2", "dense_1_more"]


def test_variables_of_one_name_are_told_apart():
    assert list(name_variables(variables())) == NAMES


def test_the_slots_of_an_optimizer_in_another_one_are_those_of_variables():
    """They were counted among the optimizer's own values, of which one partition's came back."""
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    named = name_variables(variables())
    made.apply_gradients([(tf.zeros(2), each) for each in named.values()])
    slots, own = optimizer_state(made, named)
    assert set(slots) == {f"{name}/momentum" for name in NAMES}
    assert set(own) == {
        "iteration", "learning_rate", "step_counter", "dynamic_scale", "iteration#2", "learning_rate#2"
    }  # fmt: skip


def test_an_optimizer_of_keras_is_taken_apart():
    made = keras.optimizers.Adam(0.1, use_ema=True)
    named = name_variables(variables())
    made.build(list(named.values()))
    slots, own = optimizer_state(made, named)
    assert set(slots) == {f"{name}/{slot}" for name in NAMES for slot in ("momentum", "velocity", "average")}
    assert set(own) == {"iteration", "learning_rate"}
    for number, name in enumerate(NAMES):
        assert slots[f"{name}/momentum"] is made._momentums[number]


def test_an_optimizer_that_was_built_for_some_of_the_variables():
    made = keras.optimizers.SGD(0.1, momentum=0.9)
    named = name_variables(variables())
    made.build([named["dense#2"], named["dense_1"]])
    assert set(optimizer_state(made, named)[0]) == {"dense#2/momentum", "dense_1/momentum"}


def test_an_optimizer_inside_of_another_one():
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
    named = name_variables(variables())
    made.build(list(named.values()))
    slots, own = optimizer_state(made, named)
    assert set(slots) == {f"{name}/{slot}" for name in NAMES for slot in ("momentum", "velocity")}
    assert {"iteration", "iteration#2", "dynamic_scale", "step_counter"} <= set(own)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("kind", ["legacy", "new"])
def test_an_optimizer_of_tf_keras_is_taken_apart(kind, applied):
    tf_keras = pytest.importorskip("tf_keras")
    made = (tf_keras.optimizers.legacy if kind == "legacy" else tf_keras.optimizers).Adam(0.1)
    keras.utils.clear_session()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    named = name_variables(model.variables)
    if applied:
        plain = [private.underlying(each) for each in named.values()]
        made.apply_gradients([(tf.ones(each.shape), each) for each in plain])
    else:
        private.build_optimizer(made, named.values())
    slots, own = optimizer_state(made, named)
    assert set(slots) == {f"{name}/{slot}" for name in named for slot in ("m", "v")}
    assert slots["sequential/dense/kernel/m"].shape == (2, 3)
    assert {"iter", "iteration"} & set(own)


def test_numbers_that_keras_counts_do_not_matter():
    assert fit(["a_4/b_1", "a_5/b_1"], ["a/b", "a_1/b"]) == {"a_4/b_1": "a/b", "a_5/b_1": "a_1/b"}
    swapped = ["block_2", "block_1"]
    assert fit(swapped, ["block_1", "block_2"]) == {name: name for name in swapped}


def test_a_variable_without_a_value_says_its_name():
    variable = keras.Variable([1.0, 2.0], name="kernel")
    later = tf.function(lambda: variable.value + 1.0)
    private.free(variable, "kernel, a variable of partition 1")
    assert private.uninitialised(private.underlying(variable))
    for read in (variable.numpy, later):
        with pytest.raises(
            tf.errors.FailedPreconditionError, match="find variable kernel, a variable of partition 1"
        ):
            read()
    variable.assign([3.0, 4.0])
    assert variable.numpy().tolist() == [3.0, 4.0] and later().numpy().tolist() == [4.0, 5.0]
