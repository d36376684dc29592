"""The seconds of an operation, counted: its products at a rate, the bytes that it moves at another, and a start.

The rates are those of one core of a server of our days. Only their ratios matter for where a model is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from weft.tensorflow import private

PRODUCTS_PER_S = 70e9
BYTES_PER_S = 10e9
START_S = 2e-6
TURNS = 16
"""How often a loop is taken to run."""
FREE = {"Const", "Placeholder", "Identity", "IdentityN", "NoOp", "ReadVariableOp", "Reshape", "ExpandDims", "Squeeze",
        "StopGradient", "PreventGradient", "Shape", "BroadcastGradientArgs"}  # fmt: skip


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor of a graph; dims that are not known count 1, and so does a shape that is not known."""
    if tensor.shape.rank is None:
        return ()
    return tuple(1 if dim is None else int(dim) for dim in tensor.shape)


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor of a graph, as far as its shape is known; 0 where it has no data of fixed size."""
    size = getattr(tensor.dtype, "size", 0)
    return prod(shape_of(tensor)) * size if size else 0


def _matmul(operation: Any) -> int:
    first = shape_of(operation.inputs[0])
    names = ("adj_x", "transpose_a")
    flipped = next((operation.get_attr(name) for name in names if name in operation.node_def.attr), False)
    inner = (first[-2] if flipped else first[-1]) if len(first) > 1 else 1
    return inner * prod(shape_of(operation.outputs[0]))


def _einsum(operation: Any) -> int:
    """The product of all dims that have a label, and of those that an ellipsis stands for."""
    equation = operation.get_attr("equation").decode()
    dims: dict[str | int, int] = {}
    for labels, tensor in zip(equation.split("->")[0].split(","), operation.inputs, strict=True):
        before, _, after = labels.replace(" ", "").partition("...")
        shape = shape_of(tensor)
        between = len(shape) - len(before) - len(after)
        names = [*before, *range(-between, 0), *after]
        for name, dim in zip(names, shape, strict=False):
            dims[name] = max(dim, dims.get(name, 1))
    return prod(dims.values())


def _convolution(operation: Any) -> int:
    kernel = shape_of(operation.inputs[1])
    return prod(shape_of(operation.outputs[0])) * prod(kernel[:-1])


def _depthwise(operation: Any) -> int:
    return prod(shape_of(operation.outputs[0])) * prod(shape_of(operation.inputs[1])[:2])


def _filter_gradient(operation: Any) -> int:
    """As many products as the convolution: output gradient times the kernel without its output channels."""
    return prod(shape_of(operation.inputs[2])) * prod(shape_of(operation.outputs[0])[:-1])


def _input_gradient(operation: Any) -> int:
    kernel = shape_of(operation.inputs[1])
    return prod(shape_of(operation.inputs[2])) * prod(kernel[:-1])


def _depthwise_gradient(operation: Any) -> int:
    kernel = shape_of(operation.inputs[1]) if "Input" in operation.type else shape_of(operation.outputs[0])
    return prod(shape_of(operation.inputs[2])) * prod(kernel[:2])


PRODUCTS: dict[str, Callable[[Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _depthwise,
    "Conv2DBackpropFilter": _filter_gradient,
    "Conv2DBackpropInput": _input_gradient,
    "Conv3DBackpropFilterV2": _filter_gradient,
    "Conv3DBackpropInputV2": _input_gradient,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_gradient,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_gradient,
}


def work_s(operation: Any, depth: int = 0) -> float:
    """The seconds of an operation, as far as they can be counted."""
    if operation.type in FREE:
        return 0.0
    inside = sum(work_s(each, depth + 1) for each in _bodies(operation)) if depth < 4 else 0.0
    if inside:
        return inside * (TURNS if "While" in operation.type else 1)
    counter = PRODUCTS.get(operation.type)
    products = counter(operation) if counter is not None else 0
    moved = sum(bytes_of(tensor) for tensor in (*operation.inputs, *operation.outputs))
    return 2 * products / PRODUCTS_PER_S + moved / BYTES_PER_S + START_S


def _bodies(operation: Any) -> list[Any]:
    """The operations of the functions that an operation calls; of a condition's branches both."""
    found = []
    for name in ("f", "body", "then_branch", "else_branch"):
        if name in operation.node_def.attr:
            found += private.operations_of(operation.graph, operation.node_def.attr[name].func.name)
    return found
