"""What a step gives back: one entry for each microbatch, and means that know who was larger."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from weft.errors import UsageError  # noqa: E402
from weft.session.not_a_tensor import NoTensorError  # noqa: E402
from weft.tensorflow.output import (  # noqa: E402
    Means,
    StepOutput,
    is_gradient,
    variable_of_gradient,
)

DRAW = np.random.default_rng(3)
ENTRIES = [DRAW.normal(size=(rows, 2)).astype(np.float32) for rows in (3, 3, 3)]
WEIGHTS = [0.5, 0.25, 0.25]


def output(*more):
    return StepOutput([tf.constant(entry) for entry in ENTRIES], *more)


def equal(found, expected):
    return np.allclose(found.numpy(), expected, rtol=1e-6) and found.shape == np.shape(expected)


def test_reductions_are_those_of_numpy():
    assert equal(output().reduce_mean(), np.mean(ENTRIES, 0))
    assert equal(output().reduce_sum(), np.sum(ENTRIES, 0))
    assert equal(output().concat(), np.concatenate(ENTRIES))
    assert equal(output().merge(), np.concatenate(ENTRIES))
    assert equal(output().stack(), np.stack(ENTRIES))
    assert output().reduce_mean().dtype == tf.float32
    assert [equal(found, entry) for found, entry in zip(output().outputs, ENTRIES, strict=True)] == [True] * 3


def test_means_of_uneven_microbatches_are_weighted():
    assert equal(output(WEIGHTS).reduce_mean(), np.average(ENTRIES, 0, WEIGHTS))
    assert equal(output(WEIGHTS).reduce_sum(), np.sum(ENTRIES, 0))
    uneven = StepOutput([tf.ones((1, 2)), tf.zeros((2, 2))], [1 / 3, 2 / 3])
    assert uneven.merge().shape == (3, 2)


def test_scalars():
    scalars = StepOutput([tf.constant(float(n)) for n in (1, 2, 6)])
    assert scalars.reduce_mean().numpy() == 3.0
    assert scalars.concat().numpy().tolist() == scalars.stack().numpy().tolist() == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("dtype", [tf.int32, tf.bool, tf.int64])
def test_means_of_numbers_without_fractions(dtype):
    counts = StepOutput([tf.cast(n, dtype) for n in (1, 0, 0, 1)])
    assert counts.reduce_mean().dtype == tf.float32 and counts.reduce_mean().numpy() == 0.5


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float64, tf.complex64])
def test_means_keep_their_type(dtype):
    for weights in (None, [0.75, 0.25]):
        found = StepOutput([tf.cast(2, dtype), tf.cast(2, dtype)], weights).reduce_mean()
        assert found.dtype == dtype and tf.cast(tf.math.real(found), tf.float32).numpy() == 2.0


def test_accumulate_is_the_mean():
    for method in ("add_n", "accumulate_n", "variable"):
        assert equal(output(WEIGHTS).accumulate(method), np.average(ENTRIES, 0, WEIGHTS))
    variable = tf.Variable(tf.ones((3, 2)))
    assert equal(output().accumulate("variable", variable), np.mean(ENTRIES, 0))
    assert equal(variable, np.mean(ENTRIES, 0))


def test_accumulate_has_three_methods():
    message = 'accumulate has the methods "add_n", "accumulate_n" and "variable", not "sum"'
    with pytest.raises(UsageError, match=message):
        output().accumulate("sum")


def test_the_mean_of_a_gradient_is_known_as_one():
    mean = output(WEIGHTS, 7).accumulate()
    assert is_gradient(mean) and variable_of_gradient(mean) == 7
    assert not is_gradient(output().accumulate()) and not is_gradient(mean + 0.0)


def test_gradients_are_averaged_over_replicas_in_one_call():
    calls = []

    def average(tensors):
        calls.append(len(tensors))
        return [tensor * 10.0 for tensor in tensors]

    means = Means(average)
    first, second = output(None, 0, means), StepOutput([tf.constant(1.0)], None, 1, means)
    assert equal(first.reduce_mean(), 10.0 * np.mean(ENTRIES, 0))
    assert second.reduce_mean().numpy() == 10.0 and variable_of_gradient(second.reduce_mean()) == 1
    assert calls == [2]
    assert equal(first.reduce_sum(), np.sum(ENTRIES, 0))  # of this replica only


MESSAGE = (
    r"{} is for tensors, and a step returns a StepOutput, one entry for each microbatch: take .reduce_mean\(\), the "
    r"batch's mean, .merge\(\), the samples in order, or .accumulate\(\), a gradient"
)


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda one: one + 1, "__add__"), (lambda one: 2.0 * one, "__rmul__"), (lambda one: -one, "__neg__"),
        (lambda one: one < 3, "__lt__"), (float, "__float__"), (len, "__len__"), (lambda one: one[0], "__getitem__"),
        (list, "__iter__"), (lambda one: one.numpy, ".numpy"), (lambda one: one.shape, ".shape"),
        (lambda one: f"{one:.2f}", r'a format \(".2f"\)'), (bool, "__len__"),
    ],
)  # fmt: skip
def test_it_is_no_tensor(use, name):
    with pytest.raises(NoTensorError, match=MESSAGE.format(name)):
        use(output())


def test_a_name_that_tensors_do_not_have_either():
    with pytest.raises(AttributeError, match="a StepOutput has no means"):
        output().means  # noqa: B018
    assert f"{StepOutput([1, 2])}" == repr(StepOutput([1, 2])) == "StepOutput([1, 2])"


def test_microbatches_without_samples_count_nothing():
    weights = [tf.constant(each) for each in (0.0, 0.5, 0.5)]
    rows = StepOutput([tf.fill([1, 2], each) for each in (7.0, 1.0, 3.0)], weights)
    assert rows.merge().numpy().tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert rows.reduce_mean().numpy().tolist() == [[2.0, 2.0]] and rows.reduce_sum().numpy().tolist() == [
        [4.0, 4.0]
    ]


def test_weights_of_one_are_a_sum():
    assert StepOutput([tf.constant(2.0), tf.constant(3.0)], [1.0, 1.0]).reduce_mean().numpy() == 5.0


def test_masks_stay_with_their_rows():
    entries = [tf.ones([1, 2]), tf.zeros([1, 2])]
    for entry, mask in zip(entries, ([[True, False]], [[True, True]]), strict=True):
        entry._keras_mask = tf.constant(mask)
    assert StepOutput(entries).merge()._keras_mask.numpy().tolist() == [[True, False], [True, True]]
    assert not hasattr(StepOutput([*entries, tf.ones([1, 2])]).merge(), "_keras_mask")
