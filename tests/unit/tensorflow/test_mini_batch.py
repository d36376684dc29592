"""Cutting mini-batches: what is cut, what goes whole, and every error's text."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from weft.errors import SplitError  # noqa: E402
from weft.session.cut import Cut  # noqa: E402
from weft.tensorflow.mini_batch import prepare  # noqa: E402

X = tf.reshape(tf.range(24), (8, 3))
Y = tf.range(8)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Options:
    """It has no hash, since it is equal to others."""

    rate: float


def step(model=None, x=None, y=None, *rest, flag=None):
    pass


def cut(*args, microbatches=4, how=None, **kwargs):
    return prepare(step, args, kwargs, how or Cut(), microbatches)


def calls(batch):
    """What each microbatch is called with, tensors as lists."""
    parts = batch.slices([batch.leaves[number] for number in batch.tensors])
    return [tf.nest.map_structure(plain, batch.arguments(part)) for part in parts]


def plain(leaf):
    return leaf.numpy().tolist() if isinstance(leaf, tf.Tensor) else leaf


def fault(*args, **kwargs):
    with pytest.raises(SplitError) as caught:
        cut(*args, **kwargs)
    return str(caught.value)


def test_tensors_are_cut_along_the_first_dim_and_all_else_goes_whole():
    batch = cut("model", X, None, 3, flag=True)
    assert (batch.size, batch.even, batch.weights, batch.paths) == (8, True, [0.25] * 4, ["x"])
    assert [batch.bounds(index) for index in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    args, kwargs = calls(batch)[1]
    assert args == ("model", [[6, 7, 8], [9, 10, 11]], None, 3) and kwargs == {"flag": True}
    assert batch.specs() == [tf.TensorSpec((2, 3), tf.int32)]


def test_nested_structures():
    given = {"b": [Y, {"z": Y + 10, "c": (Y + 20, "kept")}], "a": Pair(Y + 30, None)}
    batch = cut(None, given, microbatches=8)
    assert batch.paths == ["x['a']", "x['b'][0]", "x['b'][1]['c'][0]", "x['b'][1]['z']"]
    (_, found), _ = calls(batch)[3]
    assert found == {"b": [[3], {"z": [13], "c": ([23], "kept")}], "a": Pair([33], None)}


def test_arguments_by_name_keep_their_names():
    batch = cut(flag=X, y=OrderedDict(b=Y, a=Y + 10), x=Y + 20, microbatches=8)
    assert batch.paths == ["flag", "x", "y['a']", "y['b']"]
    args, kwargs = calls(batch)[2]
    assert args == () and kwargs == {"flag": [[6, 7, 8]], "x": [22], "y": {"a": [12], "b": [2]}}


def test_more_arguments_than_names():
    assert cut(None, X, Y, Y, Y).paths == ["x", "y", "rest", "rest"]


def test_arrays_are_tensors():
    batch = cut(None, np.arange(8, dtype=np.float32), [np.ones((8, 2))])
    assert batch.specs() == [tf.TensorSpec((2,), tf.float32), tf.TensorSpec((2, 2), tf.float64)]
    assert calls(batch)[3][0][1] == [6.0, 7.0]


def test_variables_are_no_tensors():
    variables = [tf.Variable([1.0, 2.0, 3.0]), keras.Variable([1.0, 2.0, 3.0])]
    batch = cut(variables, X)
    assert batch.paths == ["x"] and calls(batch)[0][0][0] == variables


def test_arguments_that_go_whole():
    batch = cut(None, X, Y[:3], how=Cut(whole=["y"]))
    assert [call[0][2] for call in calls(batch)] == [[0, 1, 2]] * 4
    assert batch.specs() == [tf.TensorSpec((2, 3), tf.int32), tf.TensorSpec((3,), tf.int32)]
    scalar = cut(None, X, tf.constant(5), how=Cut(whole=["y"]))
    assert calls(scalar)[3][0][2] == 5


@pytest.mark.parametrize("axis", [1, -1])
def test_another_dim(axis):
    batch = cut(None, Y, tf.transpose(X), how=Cut(axes={"y": axis}))
    assert batch.specs()[1] == tf.TensorSpec((3, 2), tf.int32)
    assert calls(batch)[0][0][2] == [[0, 3], [1, 4], [2, 5]]


def test_one_microbatch_gets_the_tensors_themselves():
    batch = cut(None, X, microbatches=1)
    assert batch.slices([X])[0][0] is X and batch.weights == [1.0]


def test_uneven_microbatches():
    batch = cut(None, tf.range(7), how=Cut(uneven=True))
    assert [call[0][1] for call in calls(batch)] == [[0], [1, 2], [3, 4], [5, 6]]
    assert batch.weights == [1 / 7, 2 / 7, 2 / 7, 2 / 7] and not batch.even
    assert batch.specs() == [tf.TensorSpec((None,), tf.int32)]
    few = cut(None, tf.range(3), how=Cut(uneven=True))
    assert few.microbatches == 3 and [call[0][1] for call in calls(few)] == [[0], [1], [2]]
    assert cut(None, Y, how=Cut(uneven=True)).specs() == [tf.TensorSpec((2,), tf.int32)]


def test_sizes_that_are_not_known_yet():
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec(None), tf.TensorSpec([8])])
    def traced(some, unknown, eight):
        nothing = cut(None, some, unknown)
        one = cut(None, some, eight)
        found.append((nothing, one))
        return nothing.slices([some, unknown])[1], one.slices([some, eight])[1]

    given = tf.reshape(tf.range(24.0), (8, 3))
    (first, second), (third, fourth) = traced(given, given, given[:, 0])
    assert first.numpy().tolist() == second.numpy().tolist() == third.numpy().tolist()
    assert fourth.numpy().tolist() == [6.0, 9.0]
    nothing, one = found[0]
    assert (nothing.size, nothing.weights, one.size) == (None, [0.25] * 4, 8)
    assert nothing.specs() == [tf.TensorSpec((None, 3)), tf.TensorSpec(None)]
    assert one.specs() == [tf.TensorSpec((None, 3)), tf.TensorSpec((2,))]


def test_sizes_that_are_known_when_the_step_runs():
    def split(given, how):
        batch = cut(None, given, microbatches=3, how=how)
        return batch.slices([given])[2][0], batch.shares([given])

    signature = [tf.TensorSpec([None])]
    uneven = tf.function(lambda given: split(given, Cut(uneven=True)), input_signature=signature)
    even = tf.function(lambda given: split(given, Cut()), input_signature=signature)
    last, shares = uneven(tf.range(7.0))
    assert last.numpy().tolist() == [4.0, 5.0, 6.0]
    assert [float(share) for share in shares] == pytest.approx([2 / 7, 2 / 7, 3 / 7])
    last, shares = even(tf.range(6.0))
    assert last.numpy().tolist() == [4.0, 5.0]
    assert [float(share) for share in shares] == pytest.approx([1 / 3] * 3)
    last, shares = uneven(tf.range(2.0))
    assert last.numpy().tolist() == [1.0] and [float(share) for share in shares] == [0.0, 0.5, 0.5]
    message = "x has no samples, or a number that the 3 microbatches do not divide"
    for function, count in ((even, 7), (uneven, 0), (even, 0)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            function(tf.zeros(count))


def test_nothing_to_cut():
    batch = cut("model", flag=3)
    assert (batch.size, batch.microbatches, batch.specs(), calls(batch)) == (
        None, 4, [], [(("model",), {"flag": 3})] * 4,
    )  # fmt: skip


def test_keys():
    key = cut("model", X, flag=1).key()
    assert key == cut("model", X + 1, flag=1).key() and hash(key) == hash(cut("model", X, flag=1).key())
    others = [
        cut("other", X, flag=1), cut("model", X, flag=2), cut("model", X, flag=True), cut("model", Y, flag=1),
        cut("model", tf.cast(X, tf.int64), flag=1), cut("model", X, flag=1, microbatches=2),
        cut("model", X, flag=1, how=Cut(whole=["x"])),
    ]  # fmt: skip
    assert all(key != other.key() for other in others)


def test_things_without_a_hash_are_known_by_their_identity():
    options = Options(0.1)
    key = cut(options, X).key()
    assert key == cut(options, X).key()
    assert key != cut(Options(0.1), X).key()
    keys = [cut(Options(float(n)), X).key() for n in range(50)]  # the object is gone, unless the key has it
    assert len(set(keys)) == 50


def test_sizes_that_microbatches_do_not_divide():
    assert fault(None, tf.range(7)) == (
        "x has 7 samples, which 4 microbatches do not divide: choose a batch size that is a multiple of 4; give "
        "tf.data's batch() drop_remainder=True, or cut the last batch as evenly as possible with "
        "@weft.step(allow_uneven=True)"
    )


def test_no_samples():
    message = "x has no samples: leave the step out for an empty batch"
    assert fault(None, X[:0]) == fault(None, X[:0], how=Cut(uneven=True)) == message


def test_sizes_that_differ():
    assert fault(None, X, [Y[:4]]) == (
        "the tensors given to the step do not have the same batch size: x [8, 3], y[0] [4]. One that has no batch dim "
        'goes whole to every microbatch with @weft.step(non_split_inputs=["y"]); one that has it elsewhere is cut '
        'along another dim with @weft.step(input_split_axes={"y": 1})'
    )


@pytest.mark.parametrize("how, dim", [(Cut(), 0), (Cut(axes={"y": 1}), 1), (Cut(axes={"y": -2}), -2)])
def test_no_such_dim(how, dim):
    given = tf.constant(1.0) if dim == 0 else Y
    shape = [] if dim == 0 else [8]
    assert fault(None, X, given, how=how) == (
        f"y has the shape {shape} and so no dim {dim} to cut: if every microbatch needs it whole, write "
        '@weft.step(non_split_inputs=["y"])'
    )


def test_values_made_of_several_tensors():
    made = [
        tf.ragged.constant([[1, 2], [3]]), tf.sparse.from_dense(X), tf.IndexedSlices(X, Y),
    ]  # fmt: skip
    for each, name in zip(made, ("RaggedTensor", "SparseTensor", "IndexedSlices"), strict=True):
        assert fault(None, X, {"in": each}) == (
            f"y['in'] is a {name}, and a step takes plain tensors only: make it one outside of the step, with "
            "tf.convert_to_tensor, .to_tensor() or tf.sparse.to_dense"
        )


def test_names_that_the_step_does_not_have():
    assert (
        fault(None, X, how=Cut(whole=["z"], axes={"w": 1}))
        == "step has no argument z, w, which weft.step names"
    )
    prepare(lambda x, **rest: None, (X,), {}, Cut(whole=["z"]), 4)  # it may be one of the rest


def test_all_faults_are_told_at_once():
    text = fault(None, X, [Y[:4], tf.constant(1)], how=Cut(whole=["z"]))
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "y[1] has the shape [] and so no dim 0 to cut",
        "step has no argument z, which weft.step names",
        "the tensors given to the step do not have the same batch size",
    ]
