"""Gradients of weights apart from the backward pass: at once but added in one call, or later, when the schedule says W.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) cut the backward pass in two halves: I gives the gradient of a
stage's input, which another rank waits for, and W those of its weights, which fill idle time. Before the backward pass
runs, its graph is searched for nodes that apply a parameter. Autograd visits them as usual, but is not asked for
the parameter's gradient; a hook takes what that gradient is made of:

    forward    y = linear(x, weight)                 autograd's own node, which keeps x
    I          dx = dy @ weight                      autograd; the hook keeps x and dy
    W          weight.grad += dy.T @ x               by the quicker library on a CPU, see `matrix_products`

The forward pass knows nothing of it. Where the schedule has no W, the third line runs in the hook: for large weights
on a CPU, where it saves a pass over the weight and over a temporary of its size, or half a product (`FUSED_BYTES`).
A row of an embedding is added to where it is, where autograd makes a gradient of the whole table for every microbatch.

All else runs whole in I: correct, only less is left for W. So does a weight that has hooks, is computed, or is also
used in another way; what autograd unpacks by hooks, as activation checkpoints do, or cannot see into; and every
segment with a reentrant activation checkpoint, which refuses to run where autograd is asked for some gradients only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from weft.torch.backward.autograd import announce, unwatched
from weft.torch.backward.matrix_products import adder, product
from weft.torch.pytorch.private import LEAF_NODE, NODES, is_unpacked, saved

FUSED_BYTES = 512 << 10
"""From this size on a weight gains more than the hook costs, about 10 microseconds."""


class Task:
    """The gradient of ``parameter`` from one use of it, by ``node``; calling it adds to ``.grad`` and reports that.

    ``then`` is called with the task when it could run: the gradient of what the node computed is known.
    """

    __slots__ = ("grad", "kept", "node", "parameter", "then", "transposed")
    saved: str
    """What the node keeps that the weight's gradient is made of."""
    at: int
    """Which of the node's inputs the weight is."""
    transposes = False
    """Whether the weight may be transposed before."""
    fused = True
    """Whether adding at once gains something."""
    grad: Tensor | None
    kept: Any

    def __init__(self, node: Any, parameter: nn.Parameter, transposed: bool, then: Callable[[Task], None]):
        self.node: Any = node
        self.parameter = parameter
        self.transposed = transposed
        self.then: Callable[[Task], None] | None = then
        self.grad = None
        self.kept = self.keep(node)

    def __call__(self) -> None:
        with torch.no_grad():
            self.add()
        announce(self.parameter)

    def at_once(self) -> None:
        """Run in the backward pass, where no gradients are recorded, and keep nothing."""
        self.add()
        self.drop()
        announce(self.parameter)

    def drop(self) -> None:
        """Let go what the gradient is made of: this task stays as long as its node does, and so as the graph does."""
        self.kept = self.grad = None

    def meet(self, grads: Sequence[Tensor | None]) -> None:
        """Autograd is about to visit the node, with the gradient of its result."""
        then, grad = self.then, grads[0]
        # Both may hold this task, and a cycle keeps its memory until it is searched for.
        self.node = self.then = None
        if grad is not None and then is not None:
            self.grad = grad
            then(self)
        else:
            self.drop()

    def keep(self, node: Any) -> Any:
        """The node's saved values, which it lets go when it has run. It is taken when the graph is searched, not
        between two kernels."""
        raise NotImplementedError

    def add(self) -> None:
        """Add to the parameter's ``.grad``; called again it adds the same again."""
        raise NotImplementedError

    def prepared(self) -> Callable[[], Any]:
        """A function that does what ``add`` does, with as little Python as can be."""
        return self.add


class _Product(Task):
    """``x @ weight.T`` with ``weight`` [out, in], as ``linear`` has it, or ``x @ weight`` with ``weight`` [in, out]."""

    __slots__ = ()
    saved, at, transposes = "mat1", 2, True

    def keep(self, node: Any) -> tuple[Tensor, float]:
        return saved(node, "mat1").detach(), saved(node, "alpha")

    def add(self) -> None:
        x, factor = self.kept
        assert self.grad is not None
        add_product(self.parameter, *self._sides(self.grad, x), factor)

    def prepared(self) -> Callable[[], Any]:
        x, factor = self.kept
        held = self.parameter.grad
        if held is None or held.layout != torch.strided or self.grad is None:
            return self.add
        return adder(held, *self._sides(self.grad, x), factor)

    def _sides(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (grad.t(), x) if self.transposed else (x.t(), grad)


class _PlainProduct(_Product):
    """A matrix product without a bias."""

    __slots__ = ()
    saved, at = "self", 1

    def keep(self, node: Any) -> tuple[Tensor, float]:
        return saved(node, "self").detach(), 1


class _Embedding(Task):
    """A table lookup; all of its backward pass is W."""

    __slots__ = ()
    saved, at = "indices", 0

    def keep(self, node: Any) -> tuple[Tensor, int, bool]:
        padding = saved(node, "padding_idx")
        padding = padding if padding < len(self.parameter) else -1  # none is -1 as an unsigned number
        return saved(node, "indices"), padding, saved(node, "scale_grad_by_freq")

    def add(self) -> None:
        indices, padding, by_count = self.kept
        grad, held = self.grad, self.parameter.grad
        assert grad is not None
        if held is None or held.layout != torch.strided or not held.is_cpu or by_count:
            backward, rows = torch.ops.aten.embedding_dense_backward, len(self.parameter)
            add_grad(self.parameter, backward(grad.contiguous(), indices, rows, padding, by_count))
            return
        indices, lines = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if padding >= 0:
            wanted = indices != padding
            indices, lines = indices[wanted], lines[wanted]
        held.index_add_(0, indices, lines)


class _Convolution(Task):
    """Any convolution."""

    __slots__ = ()
    saved, at, fused = "input", 1, False

    def keep(self, node: Any) -> tuple[Tensor, list[Any]]:
        settings = [
            list(size) for size in (saved(node, "stride"), saved(node, "padding"), saved(node, "dilation"))
        ]
        more = [saved(node, "transposed"), list(saved(node, "output_padding")), saved(node, "groups")]
        return saved(node, "input").detach(), [*settings, *more]

    def add(self) -> None:
        x, settings = self.kept
        backward, weight = torch.ops.aten.convolution_backward, self.parameter.detach()
        found = backward(self.grad, x, weight, None, *settings, [False, True, False])
        add_grad(self.parameter, found[1])


class _Reentrant(Exception):
    """The graph has a reentrant activation checkpoint: PyTorch's, or another package's of the same name."""


class _Kinds(dict[type, "type[Task] | None"]):
    """Kinds of tasks by autograd's type of the node, None for all other types."""

    def __missing__(self, kind: type) -> None:
        if kind.__name__ == "CheckpointFunctionBackward":
            raise _Reentrant
        if not issubclass(kind, BackwardCFunction):  # those may be made for one call only
            self[kind] = None


KINDS = {
    "AddmmBackward0": _Product,
    "MmBackward0": _PlainProduct,
    "EmbeddingBackward0": _Embedding,
    "ConvolutionBackward0": _Convolution,
}
KNOWN = _Kinds({NODES[name]: kind for name, kind in KINDS.items() if name in NODES})
TRANSPOSED = NODES.get("TBackward0")


def add_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to ``parameter.grad`` as autograd does."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad


def add_product(parameter: nn.Parameter, left: Tensor, right: Tensor, factor: float = 1) -> None:
    """Add ``factor`` times the matrix product ``left @ right`` to ``parameter.grad``."""
    held = parameter.grad
    if held is None or held.layout != torch.strided:
        found = product(left, right)
        add_grad(parameter, found if factor == 1 else found * factor)
    else:
        adder(held, left, right, factor)()


def run_all(tasks: Sequence[Task]) -> None:
    """Call all tasks. Everything is looked up before the first one computes: a large product empties the caches, and
    Python that runs between two of them takes ten times as long as elsewhere."""
    with torch.no_grad():
        for add, parameter in [(task.prepared(), task.parameter) for task in tasks]:
            add()
            announce(parameter)


class Gathering(Protocol):
    """Parameters that are gathered layer by layer; see ``gathering.by_layer``."""

    def layer_of(self, parameter: Tensor) -> Any:
        """The layer that the parameter is gathered with; None for another parameter."""
        ...

    def take_gradients(self, layer: Any) -> None:
        """The gradients of a layer are there."""
        ...

    def take_all_gradients(self) -> None:
        """So are those of all layers that have some."""
        ...


def run_by_layer(gathering: Sequence[Gathering], tasks: Sequence[Task]) -> None:
    """Call all tasks, and hand over the gradients of each gathered layer when its own have run."""

    def layer_of(task: Task) -> Any:
        found = ((each, each.layer_of(task.parameter)) for each in gathering)
        return next(((each, layer) for each, layer in found if layer is not None), None)

    for found, some in itertools.groupby(tasks, layer_of):
        run_all(list(some))
        if found is not None:
            each, layer = found
            each.take_gradients(layer)
    for each in gathering:
        each.take_all_gradients()


def take_weights(
    roots: Sequence[Tensor | GradientEdge], then: Callable[[Task], None], at_once: bool = False
) -> tuple[GradientEdge, ...]:
    """Take weights' gradients out of the backward pass that is about to run from ``roots``.

    Args:
        roots: What it runs from: tensors that were computed, or their edges.
        then: Called by the backward pass with each task when it could run.
        at_once: Take only those that are faster if they run then.

    Returns:
        What the backward pass has to reach, autograd's ``inputs``; nothing if autograd is to do everything.
    """
    tasks: list[tuple[Any, Task]] = []
    try:
        ends = _search(roots, tasks, then, at_once)
    except _Reentrant:
        return ()
    otherwise = {leaf for leaf, _ in tasks}.intersection(ends)  # used in another way, too
    reached = list(ends)
    for leaf, task in tasks:
        if leaf not in otherwise:
            reached.append(task.node)
            task.node.register_prehook(task.meet)
    if len(reached) == len(ends):
        return ()
    return tuple([new(GradientEdge, (node, 0)) for node in reached])


new = tuple.__new__
"""A ``GradientEdge`` by this takes two thirds of the time."""


def _search(
    roots: Sequence[Tensor | GradientEdge], tasks: list[tuple[Any, Task]], then: Callable[[Task], None], at_once: bool
) -> list[Any]:  # fmt: skip
    """The leaves' nodes to which a path leads that is not of ``tasks``, which this fills, beside their leaf's node.

    A node takes half a microsecond: much less than autograd's visit, but there are many.
    """
    nodes = (root.grad_fn if isinstance(root, Tensor) else root.node for root in roots)
    waiting: list[Any] = list(
        dict.fromkeys(nodes)
    )  # two tensors may have one node, which autograd visits once
    seen = {None, *waiting}
    ends = []
    while waiting:
        node = waiting.pop()
        edges = node.next_functions
        if not edges:
            ends.append(node)  # a leaf
            continue
        kind = KNOWN[type(node)]
        if kind is not None:
            leaf, transposed = edges[kind.at][0], False
            if kind.transposes and type(leaf) is TRANSPOSED:
                leaf, transposed = leaf.next_functions[0][0], True
            if type(leaf) is LEAF_NODE and _wanted(kind, node, leaf.variable, at_once):
                tasks.append((leaf, kind(node, leaf.variable, transposed, then)))
                edges = edges[: kind.at] + edges[kind.at + 1 :]
        for following, _ in edges:
            if following not in seen:
                seen.add(following)
                (ends if type(following) is LEAF_NODE else waiting).append(following)
    return ends


def _wanted(kind: type[Task], node: Any, parameter: Any, at_once: bool) -> bool:
    """True if the node may have a task, and gains by it.

    Nothing but the optimizer and the reducer may look at the parameter's gradient: it must be a leaf without hooks.
    autograd adds nothing to one that was frozen since the forward pass.
    """
    return (
        not (at_once and not (kind.fused and large(parameter) and parameter.is_cpu))
        and type(parameter) is nn.Parameter
        and parameter.requires_grad
        and unwatched(parameter)
        and not is_unpacked(node, kind.saved)
        and not parameter.is_complex()
        and not (kind is _Embedding and saved(node, "sparse"))
    )


def large(parameter: nn.Parameter) -> bool:
    """True if adding to this parameter's gradient in one call gains something, on a CPU."""
    return parameter.nbytes >= FUSED_BYTES
