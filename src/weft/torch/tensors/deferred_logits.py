"""Logits that are not computed until it is known what for: a cross entropy of them takes them in chunks of rows.

A language model's head makes a number for each token and word, and the loss three or four tensors of that size more:
at 128,000 words they are most of the memory of the last rank. But the loss needs only rows:

    logits[i] = x[i] @ weight.T + bias          loss[i] = logsumexp(logits[i]) - logits[i, label[i]]

So the head returns a tensor that knows ``x`` and ``weight`` and has no memory. Whatever leaves rows whole (views,
slices of rows, a cast, a scale, a soft cap) gives another such tensor. Where the loss comes, chunks of rows are
computed, used and dropped. Where the loss is one number, the same chunks give the gradients of ``x`` and ``weight``;
else the backward pass computes them again. Any other operation gets the logits as they are (`Logits.dense`). Autograd
sees one node, a linear layer. That layer, and what operations make of its result: ``deferred_linear``.

The idea of the chunks: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import enable_reentrant_dispatch

from weft.errors import UsageError
from weft.torch.pytorch.private import (
    LOG_SOFTMAX,
    no_functions,
    version,
    wrapper,
    writes,
)
from weft.torch.tensors.pytree import map_tensors

aten = torch.ops.aten
CHUNK_BYTES = 32 << 20
"""Of a chunk's logits in single precision."""
LEAST_ROWS = 256
"""Of a chunk: with fewer the weight's gradient is read and written too often."""
SAME = (aten.alias.default, aten.detach.default)
"""Operations whose result is the tensor itself, to all that is deferred."""
ALIVE: weakref.WeakSet[Deferred] = weakref.WeakSet()
"""All deferred tensors of this process."""
CHANGED = (
    "the input or the weight of the model's last layer was changed in place before its result was used, which "
    '"chunked_loss" defers: use the result before, or set "chunked_loss" to "off"'
)


class Use:
    """The use that is made of a layer's results, as far as it is known.

    Attributes:
        defers: Nothing but losses of rows, so far.
        ahead: The loss is one number, so far. Its gradient scales those of input and weight, which can be computed with
            it, from the same chunks.
    """

    def __init__(self) -> None:
        self.defers = self.ahead = True
        self._held: weakref.ref[Gradients] | None = None

    def hold(self, gradients: Gradients) -> None:
        """Note gradients that wait for the backward pass; they are as large as the weight."""
        self._held = weakref.ref(gradients)

    @property
    def holds(self) -> bool:
        """True if gradients wait for a backward pass."""
        return self._held is not None and self._held() is not None


class Rules(NamedTuple):
    """The results of operations on deferred logits, by operation; a rule gives None where it needs them as they are.

    Attributes:
        forward: From logits, the operation, its other arguments and keywords: other logits, or a tensor.
        backward: From a gradient, the logits that the operation of the forward pass gave, and the other arguments.
        adjoint: True if the operation gives the gradient of `Logits.parent` from that of what was made of it.
    """

    forward: Mapping[Any, Callable[[Logits, Any, Any, Any], Any]]
    backward: Mapping[Any, Callable[..., Any]]
    adjoint: Mapping[Any, Callable[[Logits, Any, Any], bool]]


class Source:
    """The linear layer of some logits.

    Args:
        x: Its input, [..., in].
        weight: [out, in].
        bias: [out], or none.
        use: What its results are used for.
        wanted: Of which of the three a gradient is wanted.
        rules: Those of operations on its result.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, use: Use, wanted: tuple[bool, ...], rules: Rules
    ) -> None:
        self.x = x.detach().reshape(-1, x.shape[-1])
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.use = use
        self.wanted = wanted
        self.rules = rules
        self.family: weakref.WeakSet[Deferred] = weakref.WeakSet()
        """All deferred tensors that come from this layer's result."""
        self._watched = [(each, version(each)) for each in (x, weight, bias) if each is not None]

    def check(self) -> None:
        """Refuse a layer whose input or weight is another one by now."""
        if any(version(tensor) != before for tensor, before in self._watched):
            raise UsageError(CHANGED)

    def settle(self) -> None:
        """Compute all that has been made of the layer's result: whoever has its memory may write there."""
        for each in list(self.family):
            each.logits.dense()
        self.use.defers = False

    def logits(self, x: Tensor) -> Tensor:
        """The layer's result for some rows of its input."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Gradients:
    """Those of a layer's input, weight and bias, where they are wanted, chunk by chunk."""

    def __init__(self, source: Source) -> None:
        given = (source.x, source.weight, source.bias)
        self.found = [
            torch.zeros_like(each) if each is not None and wanted else None
            for each, wanted in zip(given, source.wanted, strict=True)
        ]
        self._weight = source.weight

    def add(self, rows: Tensor, inputs: Tensor, of_logits: Tensor) -> None:
        """Add what the gradient of some rows of the layer's result gives."""
        of_x, of_weight, of_bias = self.found
        if of_x is not None:
            of_x[_index(rows, of_x.device)] = of_logits @ self._weight
        if of_weight is not None:
            of_weight.addmm_(of_logits.t(), inputs)
        if of_bias is not None:
            of_bias += of_logits.sum(0)

    def scaled(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """All times ``factor``."""
        return [each if each is None or factor is None else each.mul_(factor) for each in self.found]


def _index(rows: Tensor, device: torch.device) -> slice | Tensor:
    """The index of these rows of a tensor on ``device``: a slice if they follow each other."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows.to(device)


class Map(NamedTuple):
    """An operation on each logit, with what follows it in aten's call."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        result: Tensor = self.func(logits, *self.args, **self.kwargs)
        return result


class Logits:
    """Some logits [..., out], not computed yet: ``made`` makes them of ``parent``, or they are the layer's result.

    Tensors refer to this, and it to none of them: autograd's graph keeps tensors, and tensors keep the graph.

    Attributes:
        rows: [...] which row of the layer's input each row is of, on the CPU.
        like: A tensor of the same sizes and strides on the device "meta".
        maps: What is done to each logit since.
        value: The logits, once something needs them.
        ahead: Gradients of the layer, computed with a loss whose gradient would be 1.
    """

    def __init__(
        self, source: Source, rows: Tensor, like: Tensor, maps: tuple[Map, ...] = (), parent: Logits | None = None,
        made: Map | None = None,
    ) -> None:  # fmt: skip
        self.source, self.rows, self.like, self.maps, self.parent = source, rows, like, maps, parent
        self.made = made
        self.shape, self.dtype, self.device = like.shape, like.dtype, source.x.device
        self.value: Tensor | None = None
        self.ahead: Gradients | None = None

    @property
    def normalised(self) -> bool:
        """True if these are logarithms of probabilities."""
        return self.made is not None and self.made.func is LOG_SOFTMAX

    def dense(self) -> Tensor:
        """The logits, with memory; views of them share it."""
        if self.value is None:
            self.value = self._computed(Logits.dense)
        return self.value

    def computed(self) -> Tensor:
        """The logits, for this once."""
        return self._computed(Logits.computed) if self.value is None else self.value

    def _computed(self, of: Callable[[Logits], Tensor]) -> Tensor:
        if self.parent is not None and self.made is not None:
            return self.made(of(self.parent))
        self.source.check()
        return self.source.logits(self.source.x).view(self.shape)

    def child(
        self, func: Any, rest: Any, kwargs: Any, rows: Tensor | None = None, maps: bool = False
    ) -> Logits:
        """The result of an operation on these logits. ``maps``: it changes each of them."""
        made = Map(func, rest, kwargs)
        return Logits(
            self.source, self.rows if rows is None else rows, made(self.like),
            (*self.maps, made) if maps else self.maps, self, made,
        )  # fmt: skip

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Chunk by chunk: where it is among the rows, which rows of the input these are, the layer's result, and
        what the operations since have made of that."""
        self.source.check()
        rows = self.rows.reshape(-1)
        size = max(LEAST_ROWS, CHUNK_BYTES // (4 * self.shape[-1]))
        for first in range(0, len(rows), size):
            at = slice(first, min(first + size, len(rows)))
            x = self.source.x[_index(rows[at], self.device)]
            layer = self.source.logits(x)
            yield at, x, layer, self._mapped(layer)

    def _mapped(self, logits: Tensor) -> Tensor:
        for each in self.maps:
            logits = each(logits)
        return logits

    def back(self, layer: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the layer's result for some rows, from that of what the operations since made of it."""
        grad = grad.to(self.dtype)
        if not self.maps:
            return grad
        with torch.enable_grad():
            leaf = layer.detach().requires_grad_()
            return torch.autograd.grad(self._mapped(leaf), leaf, grad)[0]

    def before_copies(self) -> Logits:
        """Those that these are a copy of, or these."""
        one = self
        while one.parent is not None and one.made is not None and one.made.func is aten.clone.default:
            one = one.parent
        return one


class Deferred(Tensor):
    """Logits without memory; see the module."""

    __torch_function__ = no_functions
    logits: Logits

    @staticmethod
    def __new__(cls, logits: Logits) -> Deferred:
        self: Deferred = wrapper(cls, logits.like, logits.device)
        self.logits = logits
        logits.source.family.add(self)
        ALIVE.add(self)
        return self

    # what passes the dispatcher by needs the memory

    def with_memory(self) -> Tensor:
        """The logits as a plain tensor without a graph, which shares its memory with later results."""
        self.logits.source.settle()
        return self.logits.dense().detach().requires_grad_(self.requires_grad)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.with_memory().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.with_memory().tolist()

    def data_ptr(self) -> int:
        return self.with_memory().data_ptr()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.with_memory().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.with_memory().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.with_memory().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Deferred) and first.logits.value is None:
            if func in SAME:
                return Deferred(first.logits)
            rule = first.logits.source.rules.forward.get(func)
            found = None if rule is None else rule(first.logits, func, args[1:], kwargs)
            if found is not None:
                return Deferred(found) if isinstance(found, Logits) else found
        return _backward(func, args, kwargs)


class DeferredGrad(Tensor):
    """The gradient of ``of``, some logarithms of probabilities or logits, without memory:

        of the logarithms    at[i] at label[i], and everywhere[i] besides
        of the logits        what log_softmax's and the operations' backward passes make of that

    ``logp``: the logarithms. ``factor``: of the gradients that were computed ahead; None if these do not give it.
    """

    __torch_function__ = no_functions

    @staticmethod
    def __new__(
        cls, of: Logits, logp: Logits, labels: Tensor, at: Tensor, everywhere: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> DeferredGrad:  # fmt: skip
        self: DeferredGrad = wrapper(cls, of.like, of.device)
        self.of, self.logp, self.labels, self.at, self.everywhere = of, logp, labels, at, everywhere
        self.factor = factor
        return self

    of: Logits
    logp: Logits
    labels: Tensor
    at: Tensor
    everywhere: Tensor | None
    factor: Tensor | None

    def moved(self, of: Logits) -> DeferredGrad:
        """The same as the gradient of what ``of`` was before."""
        return DeferredGrad(of, self.logp, self.labels, self.at, self.everywhere, self.factor)

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunk by chunk: which rows of `logp` it is of, their input, and the gradient of the layer's result."""
        logits = self.logp.parent
        assert logits is not None
        dtype = self.logp.dtype
        for at, x, layer, mapped in logits.chunks():
            yield at, x, logits.back(layer, self._of_logits(torch.log_softmax(mapped, -1, dtype=dtype), at))

    def _of_logits(self, logp: Tensor, at: slice) -> Tensor:
        """The gradient of the logits of rows whose logarithms of probabilities are given, which are overwritten."""
        everywhere = None if self.everywhere is None else self.everywhere[at]
        return gradient_of_logits(logp, self.labels[at], self.at[at], everywhere)

    def dense(self) -> Tensor:
        """The gradient, with memory."""
        if self.of is self.logp:
            found = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            if self.everywhere is not None:
                found += self.everywhere.unsqueeze(1)
            return found.scatter_add_(1, self.labels.unsqueeze(1), self.at.to(self.dtype).unsqueeze(1))
        logits = self.logp.parent
        assert logits is not None
        found = torch.empty(self.logp.shape, dtype=logits.dtype, device=self.device)
        for at, _, _, mapped in logits.chunks():
            found[at] = self._of_logits(torch.log_softmax(mapped, -1, dtype=self.logp.dtype), at)
        path = []
        one = logits
        while one is not self.of:
            path.append(one)
            assert one.parent is not None
            one = one.parent
        with (
            enable_reentrant_dispatch(),
            torch.enable_grad(),
        ):  # the operations between, on the logits as they are
            leaf = self.of.dense().detach().requires_grad_()
            mapped = leaf
            for step in reversed(path):
                assert step.made is not None
                mapped = step.made(mapped)
            return torch.autograd.grad(mapped, leaf, found)[0] if path else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredGrad):
            if func in SAME:
                return first.moved(first.of)
            rule, of = first.of.source.rules.adjoint.get(func), first.of.before_copies()
            if rule is not None and of.parent is not None and rule(of, args[1:], kwargs):
                return first.moved(of.parent)
        if func is aten.add.Tensor and not kwargs:
            found = _sum(*args)
            if found is not None:
                return found
        return _backward(func, args, kwargs)


def gradient_of_logits(logp: Tensor, labels: Tensor, at: Tensor, everywhere: Tensor | None = None) -> Tensor:
    """The gradient of logits [rows, words], from ``logp``, which it overwrites: softmax's, of a gradient of the
    logarithms that is ``at[i]`` at label i, and ``everywhere[i]`` besides."""
    words, own, sums = logp.shape[1], at.unsqueeze(1).to(logp.dtype), at
    if everywhere is not None:
        sums = at + words * everywhere
    found = logp.exp_().mul_(-sums.unsqueeze(1).to(logp.dtype)).scatter_add_(1, labels.unsqueeze(1), own)
    return found if everywhere is None else found.add_(everywhere.unsqueeze(1).to(found.dtype))


def _sum(one: Any, other: Any) -> DeferredGrad | None:
    """The sum of a gradient that is at labels, and of one that is the same for a whole row."""
    if not isinstance(one, DeferredGrad):
        one, other = other, one
    if (
        not isinstance(one, DeferredGrad)
        or isinstance(other, (Deferred, DeferredGrad))
        or one.of is not one.logp
    ):
        return None
    if other.shape != one.shape or other.stride(1) != 0:
        return None
    rows = other[:, 0] if one.everywhere is None else one.everywhere + other[:, 0]
    return DeferredGrad(one.of, one.logp, one.labels, one.at, rows)


def _backward(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation of a loss's backward pass without memory, or of any operation with it."""
    second = args[1] if len(args) > 1 else None
    if isinstance(second, Deferred) and second.logits.value is None:
        rule = second.logits.source.rules.backward.get(func)
        found = None if rule is None else rule(args[0], second.logits, *args[2:])
        if found is not None:
            return found
    return _plainly(func, args, kwargs)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on tensors that have memory."""
    found: list[Deferred] = []

    def dense(thing: Any) -> Any:
        if isinstance(thing, Deferred):
            found.append(thing)
            thing.logits.source.settle()
            return thing.logits.dense()
        return thing.dense() if isinstance(thing, DeferredGrad) else thing

    plain_args, plain_kwargs = map_tensors((args, kwargs), dense)
    result = func(*plain_args, **plain_kwargs)
    if not writes(func):
        return result
    back = {id(one.logits.dense()): one for one in found}  # autograd wants to have what it gave
    return map_tensors(result, lambda tensor: back.get(id(tensor), tensor))


def settled(tensor: Tensor) -> Tensor:
    """``tensor``, with memory if it was deferred; autograd's graph stays."""
    found: Tensor = _Settled.apply(tensor) if isinstance(tensor, Deferred) else tensor  # type: ignore[no-untyped-call]
    return found


class _Settled(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Deferred) -> Tensor:
        tensor.logits.source.settle()
        return tensor.logits.dense().view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def settle() -> None:
    """Compute what is still deferred, and in use: the step ends, and weights are about to change."""
    for each in list(ALIVE):
        each.logits.dense()
