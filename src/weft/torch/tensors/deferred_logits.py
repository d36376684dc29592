"""Logits that are not computed until it is known what for: a cross entropy of them takes them in chunks of rows.

A language model's head makes a number for each token and word, and the loss three or four tensors of that size more:
at 128,000 words they are most of the memory of the last rank. But the loss needs only rows:

    logits[i] = x[i] @ weight.T + bias          loss[i] = logsumexp(logits[i]) - logits[i, label[i]]

So the head returns a tensor that knows ``x`` and ``weight`` and has no memory. Whatever leaves rows whole (views,
slices of rows, a cast, a scale, a soft cap) gives another such tensor. Where the loss comes, chunks of rows are
computed, used and dropped. The backward pass computes them again, and gives both gradients at once. Any other
 operation gets the logits as they are (`Deferred.dense`). Autograd sees one node, a linear layer.

The idea of the chunks: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_map

from weft.errors import UsageError

aten = torch.ops.aten
CHUNK_BYTES = 32 << 20
"""Of a chunk's logits in single precision."""
LEAST_ROWS = 256
"""Of a chunk: with fewer the weight's gradient is read and written too often."""
ALIVE: weakref.WeakSet[Deferred] = weakref.WeakSet()
"""All deferred tensors of this process."""
CHANGED = (
    "the input or the weight of the model's last layer was changed in place before its result was used, which "
    '"chunked_loss" defers: use the result before, or set "chunked_loss" to "off"'
)


class Source:
    """The linear layer of some logits, and who uses these.

    Args:
        x: Its input, [..., in].
        weight: [out, in].
        bias: [out], or none.
        unusual: Called if anything but a loss of rows uses the logits.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, unusual: Callable[[], None]) -> None:
        self.x = x.detach().reshape(-1, x.shape[-1])
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.unusual = unusual
        self.family: weakref.WeakSet[Deferred] = weakref.WeakSet()
        """All deferred tensors of this layer's result."""
        self._watched = [(each, each._version) for each in (x, weight, bias) if each is not None]

    def check(self) -> None:
        """Refuse a layer whose input or weight is another one by now."""
        if any(tensor._version != version for tensor, version in self._watched):
            raise UsageError(CHANGED)

    def settle(self) -> None:
        """Compute all that has been made of the layer's result: whoever has its memory may write there."""
        for each in list(self.family):
            each.dense()
        self.unusual()

    def logits(self, x: Tensor | None = None) -> Tensor:
        """The layer's result for all its input, or for that of some rows."""
        return torch.nn.functional.linear(self.x if x is None else x, self.weight, self.bias)


def _index(rows: Tensor, device: torch.device) -> slice | Tensor:
    """What takes these rows of a tensor on ``device``: a slice if they follow each other."""
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


class Deferred(Tensor):
    """Logits [..., out] without memory; see the module. ``parent`` is what ``made`` has made this one of.

    Attributes:
        rows: [...] which row of the layer's input each row is of, on the CPU.
        like: A tensor of the same sizes and strides on the device "meta".
        maps: What is done to each logit since.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, source: Source, rows: Tensor, like: Tensor, maps: tuple[Map, ...] = (),
        parent: Deferred | None = None, made: Map | None = None,
    ) -> Deferred:  # fmt: skip
        self: Deferred = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=source.x.device
        )
        self.source, self.rows, self.like, self.maps, self.parent = source, rows, like, maps, parent
        self.made = made
        self.value = None
        source.family.add(self)
        ALIVE.add(self)
        return self

    source: Source
    rows: Tensor
    like: Tensor
    maps: tuple[Map, ...]
    parent: Deferred | None
    made: Map | None
    value: Tensor | None

    @property
    def normalised(self) -> bool:
        """True if these are logarithms of probabilities."""
        return self.made is not None and self.made.func is aten._log_softmax.default

    def dense(self) -> Tensor:
        """The logits, with memory; views of them share it."""
        if self.value is None:
            self.value = self._computed(Deferred.dense)
        return self.value

    def computed(self) -> Tensor:
        """The logits, for this once."""
        return self._computed(Deferred.computed) if self.value is None else self.value

    def _computed(self, of: Callable[[Deferred], Tensor]) -> Tensor:
        if self.parent is not None and self.made is not None:
            return self.made(of(self.parent))
        self.source.check()
        return self.source.logits().view(self.shape)

    def child(
        self, func: Any, rest: Any, kwargs: Any, rows: Tensor | None = None, maps: bool = False
    ) -> Deferred:
        """What an operation makes of these logits. ``maps``: it changes each of them."""
        made = Map(func, rest, kwargs)
        return Deferred(
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
            logits = self.source.logits(x)
            yield at, x, logits, self._mapped(logits)

    def _mapped(self, logits: Tensor) -> Tensor:
        for each in self.maps:
            logits = each(logits)
        return logits

    # what passes the dispatcher by needs the memory

    def with_memory(self) -> Tensor:
        """The logits as a plain tensor without a graph, which shares its memory with later results."""
        self.source.settle()
        return self.dense().detach().requires_grad_(self.requires_grad)

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
        if isinstance(first, Deferred) and first.value is None:
            rule = FORWARD.get(func)
            found = None if rule is None else rule(first, func, args[1:], kwargs)
            if found is not None:
                return found
        logp = args[1] if func in BACKWARD else None
        if isinstance(logp, Deferred) and logp.value is None:
            found = BACKWARD[func](func, args, kwargs)
            if found is not None:
                return found
        return _plainly(func, args, kwargs)


class DeferredGrad(Tensor):
    """The gradient of ``of``, some logarithms of probabilities or logits, without memory:

        of the logarithms    at[i] at label[i], and everywhere[i] besides
        of the logits        what log_softmax's and the operations' backward passes make of that

    ``logp``: the logarithms.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, of: Deferred, logp: Deferred, labels: Tensor, at: Tensor, everywhere: Tensor | None
    ) -> DeferredGrad:
        self: DeferredGrad = Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype, device=of.device)
        self.of, self.logp, self.labels, self.at, self.everywhere = of, logp, labels, at, everywhere
        return self

    of: Deferred
    logp: Deferred
    labels: Tensor
    at: Tensor
    everywhere: Tensor | None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return Tensor.to(self, *args, **kwargs)

    def moved(self, of: Deferred) -> DeferredGrad:
        """The same as the gradient of what ``of`` was before."""
        return DeferredGrad(of, self.logp, self.labels, self.at, self.everywhere)

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunk by chunk: which rows of `logp` it is of, their input, and the gradient of the layer's result."""
        logits = self.logp.parent
        assert logits is not None
        dtype = self.logp.dtype
        for at, x, layer, mapped in logits.chunks():
            found = self._of_logits(torch.log_softmax(mapped, -1, dtype=dtype), at).to(mapped.dtype)
            if logits.maps:
                with torch.enable_grad():
                    leaf = layer.detach().requires_grad_()
                    (found,) = torch.autograd.grad(logits._mapped(leaf), leaf, found)
            yield at, x, found

    def _of_logits(self, logp: Tensor, at: slice) -> Tensor:
        """The gradient of the logits of rows whose logarithms of probabilities are given, which are overwritten."""
        own, labels = self.at[at].unsqueeze(1), self.labels[at].unsqueeze(1)
        found, sums = logp.exp_(), own
        if self.everywhere is not None:
            sums = own + logp.shape[1] * self.everywhere[at].unsqueeze(1)
        found.mul_(-sums.to(found.dtype)).scatter_add_(1, labels, own.to(found.dtype))
        return (
            found if self.everywhere is None else found.add_(self.everywhere[at].unsqueeze(1).to(found.dtype))
        )

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
            if func in (aten.detach.default, aten.alias.default):
                return first.moved(first.of)
            rule = ADJOINT.get(func)
            of = first.of
            while of.made is not None and of.made.func in SAME and func not in SAME:
                assert of.parent is not None
                of = of.parent
            if rule is not None and of.parent is not None and of.made is not None:
                if rule(first, of, args[1:], kwargs):
                    return first.moved(of.parent)
        if func is aten.add.Tensor and not kwargs:
            found = _sum(*args)
            if found is not None:
                return found
        if func in BACKWARD:
            found = BACKWARD[func](func, args, kwargs)
            if found is not None:
                return found
        return _plainly(func, args, kwargs)


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


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on tensors that have memory."""
    found: list[Deferred] = []

    def dense(thing: Any) -> Any:
        if isinstance(thing, Deferred):
            found.append(thing)
            thing.source.settle()
            return thing.dense()
        return thing.dense() if isinstance(thing, DeferredGrad) else thing

    plain_args, plain_kwargs = tree_map(dense, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if not func._schema.is_mutable:
        return result
    back = {id(one.dense()): one for one in found}  # autograd wants to have what it gave
    return tree_map(lambda thing: back.get(id(thing), thing) if isinstance(thing, Tensor) else thing, result)


# --- what leaves rows whole -----------------------------------------------------------------------------------


def _reshaped(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    like = func(one.like, *rest)
    if not like.dim() or like.shape[-1] != one.shape[-1]:
        return None
    return one.child(func, rest, kwargs, one.rows.reshape(like.shape[:-1]))


def _unsqueezed(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    dim = rest[0] + one.dim() + 1 if rest[0] < 0 else rest[0]
    return one.child(func, rest, kwargs, one.rows.unsqueeze(dim)) if dim < one.dim() else None


def _of_rows(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    """Slices and choices along another dim than the last."""
    dim = rest[0] if rest else 0
    dim = dim + one.dim() if dim < 0 else dim
    if dim < one.dim() - 1:
        return one.child(func, rest, kwargs, func(one.rows, dim, *rest[1:], **kwargs))
    whole = func is aten.slice.Tensor and func(one.like, *rest, **kwargs).shape == one.shape
    return one.child(func, rest, kwargs) if whole else None


def _same(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    return one.child(func, rest, kwargs)


def _cast(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or one.dtype
    elsewhere = (
        kwargs.get("device", one.device) != one.device or kwargs.get("layout", torch.strided) != torch.strided
    )
    if elsewhere or not dtype.is_floating_point:
        return None
    return one.child(func, (), {"dtype": dtype}, maps=True)


def _scaled(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    if kwargs or len(rest) != 1 or not isinstance(rest[0], (int, float)):
        return None
    return one.child(func, rest, kwargs, maps=True)


def _tanh(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    return one.child(func, rest, kwargs, maps=True)


def _log_softmax(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    if one.dim() != 2 or rest[0] not in (1, -1) or not len(one.rows) or one.normalised:
        return None
    return one.child(func, rest, kwargs)


def _nll(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    """The loss of rows at labels, [rows] or a number, and the sum of the labels' weights."""
    labels, weight, reduction, ignored = rest
    if not one.normalised:
        return None
    shares = _shares(one, labels, weight, ignored)
    picked = torch.zeros(len(labels), dtype=one.dtype, device=one.device)
    safe = torch.where(labels == ignored, 0, labels)
    assert one.parent is not None
    for at, _, _, mapped in one.parent.chunks():
        logp = torch.log_softmax(mapped, -1, dtype=one.dtype)
        picked[at] = logp.gather(1, safe[at].unsqueeze(1)).squeeze(1)
    losses = torch.where(labels == ignored, picked.new_zeros(()), -picked * shares)
    total = shares.sum()
    if reduction == 0:
        return losses, losses.new_zeros(())
    found = losses.sum()
    return (found / total if reduction == 1 else found), total


def _shares(one: Deferred, labels: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What each row counts for."""
    counts = labels != ignored
    if weight is None:
        return counts.to(one.dtype)
    return torch.where(counts, weight[torch.where(counts, labels, 0)], weight.new_zeros(()))


def _sums(one: Deferred, func: Any, rest: Any, kwargs: Any) -> Any:
    """The sum of each row's logarithms, which label smoothing takes."""
    dims = [dim % 2 for dim in rest[0]] if one.dim() == 2 and rest and rest[0] else []
    if not one.normalised or dims != [1] or kwargs or rest[1:] not in ((), (False,)):
        return None
    assert one.parent is not None
    sums = torch.zeros(len(one.rows), dtype=one.dtype, device=one.device)
    for at, _, _, mapped in one.parent.chunks():
        sums[at] = torch.log_softmax(mapped, -1, dtype=one.dtype).sum(1)
    return sums


FORWARD: dict[Any, Callable[[Deferred, Any, Any, Any], Any]] = {
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _unsqueezed,
    aten.slice.Tensor: _of_rows,
    aten.select.int: _of_rows,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten._to_copy.default: _cast,
    aten.mul.Tensor: _scaled,
    aten.div.Tensor: _scaled,
    aten.tanh.default: _tanh,
    aten._log_softmax.default: _log_softmax,
    aten.nll_loss_forward.default: _nll,
    aten.sum.dim_IntList: _sums,
}
SAME = (aten.clone.default, aten.alias.default, aten.detach.default)


# --- and back ------------------------------------------------------------------------------------------------


def _nll_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, logp, labels, weight, reduction, ignored, total = args
    if not isinstance(logp, Deferred) or not logp.normalised or isinstance(grad, (Deferred, DeferredGrad)):
        return None
    at = -grad * _shares(logp, labels, weight, ignored)
    if reduction == 1:
        at = at / total
    return DeferredGrad(logp, logp, torch.where(labels == ignored, 0, labels), at, None)


def _log_softmax_backward(func: Any, args: Any, kwargs: Any) -> Any:
    grad, logp, _, dtype = args
    if not isinstance(logp, Deferred) or not isinstance(grad, DeferredGrad) or grad.of is not grad.logp:
        return None
    return (
        grad.moved(grad.logp.parent) if grad.logp.rows is logp.rows and grad.logp.parent is not None else None
    )


BACKWARD: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.nll_loss_backward.default: _nll_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
}


def _number(thing: Any) -> Any:
    return thing.item() if isinstance(thing, Tensor) and not thing.dim() else thing


def _back_to_shape(grad: DeferredGrad, of: Deferred, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None and of.parent is not None
    reshapes = of.made.func in (aten.view.default, aten._unsafe_view.default)
    return reshapes and list(rest[0]) == list(of.parent.shape)


def _back_of_rows(grad: DeferredGrad, of: Deferred, rest: Any, kwargs: Any) -> bool:
    """True for what undoes the slice that `of` is."""
    assert of.made is not None and of.parent is not None
    sizes, dim, *ends = rest
    if of.made.func is not (aten.slice.Tensor if len(ends) == 3 else aten.select.int):
        return False
    if dim == of.parent.dim() - 1:  # all words
        return of.shape == of.parent.shape
    rows = of.parent.rows
    func = of.made.func
    return list(sizes) == list(of.parent.shape) and torch.equal(
        func(rows, dim, *ends), func(rows, *of.made.args)
    )


def _back_cast(grad: DeferredGrad, of: Deferred, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None and of.parent is not None
    return of.made.func is aten._to_copy.default and kwargs.get("dtype") == of.parent.dtype


def _back_scaled(func: Any) -> Callable[..., bool]:
    def rule(grad: DeferredGrad, of: Deferred, rest: Any, kwargs: Any) -> bool:
        assert of.made is not None
        return of.made.func is func and not kwargs and len(rest) == 1 and _number(rest[0]) == of.made.args[0]

    return rule


def _back_tanh(grad: DeferredGrad, of: Deferred, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None
    output = rest[0]
    return of.made.func is aten.tanh.default and isinstance(output, Deferred) and output.maps is of.maps


def _back_squeezed(grad: DeferredGrad, of: Deferred, rest: Any, kwargs: Any) -> bool:
    assert of.made is not None
    return of.made.func is aten.unsqueeze.default


ADJOINT: dict[Any, Callable[[DeferredGrad, Deferred, Any, Any], bool]] = {
    aten.view.default: _back_to_shape,
    aten._unsafe_view.default: _back_to_shape,
    aten.slice_backward.default: _back_of_rows,
    aten.select_backward.default: _back_of_rows,
    aten.squeeze.dim: _back_squeezed,
    aten._to_copy.default: _back_cast,
    aten.mul.Tensor: _back_scaled(aten.mul.Tensor),
    aten.div.Tensor: _back_scaled(aten.div.Tensor),
    aten.tanh_backward.default: _back_tanh,
}


class _Linear(Function):
    """A linear layer with a result that is deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, unusual: Callable[[], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        rows = torch.arange(x.numel() // x.shape[-1]).view(x.shape[:-1])
        ctx.source = Source(x, weight, bias, unusual)
        like = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device="meta")
        return Deferred(ctx.source, rows, like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        flat = x.reshape(-1, x.shape[-1])
        while isinstance(grad, DeferredGrad) and grad.of.parent is not None and grad.of.made.func in SAME:  # type: ignore[union-attr]
            grad = grad.moved(grad.of.parent)
        if (
            not isinstance(grad, DeferredGrad)
            or grad.of.parent is not None
            or grad.of.source is not ctx.source
        ):
            dense = grad.dense() if isinstance(grad, (DeferredGrad, Deferred)) else grad
            dense = dense.reshape(-1, dense.shape[-1])
            return (
                (dense @ weight).view(x.shape) if of_x else None, dense.t() @ flat if of_weight else None,
                dense.sum(0) if of_bias else None, None,
            )  # fmt: skip
        rows = grad.logp.rows
        grad_x = torch.zeros_like(flat) if of_x else None
        grad_weight = torch.zeros_like(weight) if of_weight else None
        grad_bias = torch.zeros_like(bias) if of_bias else None
        for at, inputs, found in grad.chunks():
            if grad_x is not None:
                grad_x[_index(rows[at], x.device)] = found @ weight
            if grad_weight is not None:
                grad_weight.addmm_(found.t(), inputs)
            if grad_bias is not None:
                grad_bias += found.sum(0)
        return None if grad_x is None else grad_x.view(x.shape), grad_weight, grad_bias, None


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None, unusual: Callable[[], None]) -> Tensor:
    """``linear(x, weight, bias)``, computed when it is known what for."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    found: Tensor = _Linear.apply(x, weight, bias, unusual)  # type: ignore[no-untyped-call]
    return found


def settled(tensor: Tensor) -> Tensor:
    """``tensor``, with memory if it was deferred; autograd's graph stays."""
    found: Tensor = _Settled.apply(tensor) if isinstance(tensor, Deferred) else tensor  # type: ignore[no-untyped-call]
    return found


class _Settled(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Deferred) -> Tensor:
        tensor.source.settle()
        return tensor.dense().view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def settle() -> None:
    """Compute what is still deferred, and in use: the step ends, and weights are about to change."""
    for each in list(ALIVE):
        each.dense()
