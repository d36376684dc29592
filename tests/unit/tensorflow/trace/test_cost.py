"""What operations of TensorFlow are taken to cost: their products, against numbers counted by hand."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from weft.tensorflow import private  # noqa: E402
from weft.tensorflow.trace.cost import (  # noqa: E402
    BYTES_PER_S,
    PRODUCTS,
    PRODUCTS_PER_S,
    START_S,
    TURNS,
    bytes_of,
    shape_of,
    work_s,
)


@pytest.fixture
def graph():
    with private.step_graph("costs") as graph:
        yield graph


def given(*shape, dtype=tf.float32):
    return private.placeholder(dtype, shape, "given")


def products(graph, kind):
    """The products of the only operation of a kind."""
    (operation,) = [each for each in graph.get_operations() if each.type == kind]
    count = PRODUCTS[kind](operation)
    moved = sum(bytes_of(tensor) for tensor in (*operation.inputs, *operation.outputs))
    assert work_s(operation) == pytest.approx(2 * count / PRODUCTS_PER_S + moved / BYTES_PER_S + START_S)
    return count


def test_shapes_and_bytes(graph):
    assert shape_of(given(2, None, 3)) == (2, 1, 3) and bytes_of(given(2, None, 3)) == 24
    unknown = private.placeholder(tf.float32, None, "unknown")
    assert shape_of(unknown) == () and bytes_of(unknown) == 4
    assert bytes_of(given(2, dtype=tf.bfloat16)) == 4 and bytes_of(given(2, dtype=tf.string)) == 0


@pytest.mark.parametrize("flipped", [False, True])
def test_matrix_product(graph, flipped):
    tf.matmul(given(5, 3) if flipped else given(3, 5), given(7, 5), transpose_a=flipped, transpose_b=True)
    assert products(graph, "MatMul") == 3 * 5 * 7


@pytest.mark.parametrize("flipped", [False, True])
def test_matrix_products_of_a_batch(graph, flipped):
    first = given(2, 4, 5, 3) if flipped else given(2, 4, 3, 5)
    tf.matmul(first, given(2, 4, 5, 7), adjoint_a=flipped)
    assert products(graph, "BatchMatMulV2") == 2 * 4 * 3 * 5 * 7


@pytest.mark.parametrize(
    "equation, first, second, count",
    [
        ("abc,cf->abf", (2, 3, 5), (5, 7), 2 * 3 * 5 * 7),
        ("btnh,bsnh->bnts", (2, 3, 4, 8), (2, 5, 4, 8), 2 * 3 * 5 * 4 * 8),
        ("...ab,...bc->...ac", (6, 2, 3, 5), (2, 5, 7), 6 * 2 * 3 * 5 * 7),
        ("a...,...c->a...c", (3, 6, 2), (6, 2, 7), 3 * 6 * 2 * 7),
        ("...a,a->...", (6, 1, 5), (5,), 6 * 5),
    ],
)
def test_einsum(graph, equation, first, second, count):
    tf.raw_ops.Einsum(inputs=[given(*first), given(*second)], equation=equation)
    assert products(graph, "Einsum") == count


def test_convolution_and_its_gradients(graph):
    pictures, kernel = given(2, 8, 8, 3), given(3, 3, 3, 16)
    found = tf.nn.conv2d(pictures, kernel, strides=2, padding="SAME")
    assert found.shape == (2, 4, 4, 16)
    tf.gradients(found, [pictures, kernel])
    count = 2 * 4 * 4 * 16 * 3 * 3 * 3
    for kind in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert products(graph, kind) == count


def test_convolution_in_groups(graph):
    pictures, kernel = given(2, 8, 8, 6), given(3, 3, 3, 16)
    found = tf.nn.conv2d(pictures, kernel, strides=1, padding="VALID")
    tf.gradients(found, [pictures, kernel])
    for kind in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert products(graph, kind) == 2 * 6 * 6 * 16 * 3 * 3 * 3


def test_convolution_in_three_dims(graph):
    blocks, kernel = given(2, 4, 8, 8, 3), given(1, 3, 3, 3, 5)
    found = tf.nn.conv3d(blocks, kernel, strides=[1] * 5, padding="SAME")
    tf.gradients(found, [blocks, kernel])
    for kind in ("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"):
        assert products(graph, kind) == 2 * 4 * 8 * 8 * 5 * 1 * 3 * 3 * 3


def test_convolution_of_each_channel(graph):
    pictures, kernel = given(2, 8, 8, 3), given(3, 3, 3, 2)
    found = tf.nn.depthwise_conv2d(pictures, kernel, strides=[1, 1, 1, 1], padding="SAME")
    tf.gradients(found, [pictures, kernel])
    for kind in ("", "BackpropInput", "BackpropFilter"):
        assert products(graph, f"DepthwiseConv2dNative{kind}") == 2 * 8 * 8 * 3 * 2 * 3 * 3


def test_what_has_no_products_costs_what_it_moves(graph):
    found = tf.add(given(100, 10), given(10))
    assert work_s(found.op) == pytest.approx((4000 + 40 + 4000) / BYTES_PER_S + START_S)
    assert work_s(tf.identity(found).op) == 0.0


def test_loops_and_conditions_cost_what_is_inside(graph):
    weight = given(8, 8)

    def turn(value):
        return tf.matmul(value, weight)

    once = work_s(turn(given(8, 8)).op)
    loop = tf.while_loop(lambda value: tf.reduce_sum(value) < 0, lambda value: [turn(value)], [given(8, 8)])
    (operation,) = [each for each in graph.get_operations() if each.type.endswith("While")]
    assert TURNS * once <= work_s(operation) < 2 * TURNS * once
    tf.cond(tf.reduce_sum(loop[0]) < 0, lambda: turn(weight), lambda: turn(turn(weight)))
    (operation,) = [each for each in graph.get_operations() if each.type.endswith("If")]
    assert 3 * once <= work_s(operation) < 6 * once


def test_functions_cost_what_is_inside(graph):
    @tf.function
    def twice(value):
        return tf.matmul(tf.matmul(value, value), value)

    one = work_s(tf.matmul(given(8, 8), given(8, 8)).op)
    twice(given(8, 8))
    (operation,) = [each for each in graph.get_operations() if "Call" in each.type]
    assert work_s(operation) == pytest.approx(2 * one)
