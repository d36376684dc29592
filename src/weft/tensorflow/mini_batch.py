"""Cutting a mini-batch into microbatches.

Every tensor among the step's arguments is cut along dim 0 (or along the dim that ``input_split_axes`` gives for its
argument), inside lists, tuples and dicts too. Arrays count as tensors. Python's own values, models and whatever else
has no tensor go whole to each microbatch, as do the arguments named in ``non_split_inputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from weft.errors import SplitError, UsageError
from weft.session.cut import Cut, argument_names, find_different, find_unknown
from weft.tensorflow import private

COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
"""Values made of several tensors, which are not cut."""


def _along(axis: int, start: Any, stop: Any) -> tuple[Any, ...]:
    """The index of the samples from ``start`` to before ``stop`` along a dim, which may be counted from the end."""
    whole = slice(None)
    if axis < 0:
        return (..., slice(start, stop), *[whole] * (-1 - axis))
    return (*[whole] * axis, slice(start, stop))


@dataclass
class MiniBatch:
    """The arguments of a step, ready to be cut.

    Attributes:
        leaves: What the arguments hold, flat.
        structure: How they hold it.
        axes: Of each leaf the dim along which it is cut; None for what goes whole to each microbatch.
        tensors: The numbers of the leaves that are tensors.
        microbatches: How many there are.
        paths: The names of the tensors, as messages have them.
        uneven: Whether sizes of microbatches may differ by one.
        signature: What the tensors may be like, where that is said; sizes that it leaves open may change.
        size: How many samples; None if nothing is cut, or if no tensor shows that before the step runs.
        masks: The numbers of the leaves that have a mask of Keras, with those of the masks, which stand behind all.
    """

    leaves: list[Any]
    structure: Any
    axes: list[int | None]
    tensors: list[int]
    microbatches: int
    size: int | None
    paths: list[str]
    uneven: bool = False
    signature: list[tf.TensorSpec] | None = None
    masks: dict[int, int] = field(default_factory=dict)

    def bounds(self, microbatch: int) -> tuple[int, int]:
        """First and one past the last sample of a microbatch."""
        size, count = self.size or 0, self.microbatches
        return microbatch * size // count, (microbatch + 1) * size // count

    @property
    def weights(self) -> list[float]:
        """The weight of each microbatch in the mini-batch: its share of the samples."""
        if not self.size:
            return [1.0 / self.microbatches] * self.microbatches
        sizes = [stop - start for start, stop in map(self.bounds, range(self.microbatches))]
        return [size / self.size for size in sizes]

    @property
    def even(self) -> bool:
        """True if all microbatches have equally many samples."""
        return not self.size or self.size % self.microbatches == 0

    def samples(self, tensors: Sequence[Any]) -> int:
        """The number of samples of these tensors, which are given whole and with values; 0 if nothing is cut."""
        if self.size is not None:
            return self.size
        pairs = zip(self.tensors, tensors, strict=True)
        return next(
            (tensor.shape[axis] for number, tensor in pairs if (axis := self.axes[number]) is not None), 0
        )

    def specs(self) -> list[tf.TensorSpec]:
        """The specs of a microbatch's tensors."""
        found: list[tf.TensorSpec] = []
        for number in self.tensors:
            leaf, axis = self.leaves[number], self.axes[number]
            known = leaf.shape if self.signature is None else self.signature[len(found)].shape
            shape = known.as_list() if known.rank is not None else None
            if axis is not None and shape is not None and shape[axis] is not None:
                shape[axis] = shape[axis] // self.microbatches if self.even else None
            found.append(tf.TensorSpec(shape, leaf.dtype))
        return found

    def slices(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """For each microbatch its part of the tensors (given whole, in the order of ``tensors``).

        They are slices and not the outputs of one ``tf.split``: TensorFlow's optimiser moves what follows each of these
        to before the split, together with what it waits for. A microbatch that waits for the one before then waits for
        itself, and TensorFlow runs the step as it was written, with a message that its graph cannot be sorted.

        A microbatch for which no sample is left, in a mini-batch whose size is known only when the step runs, has one
        all the same: nothing can be computed of none. Its share is 0.
        """
        found: list[list[Any]] = [[] for _ in range(self.microbatches)]
        bounds = self._bounds(tensors)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            axis = self.axes[number]
            if axis is None or self.microbatches == 1:
                parts = [tensor] * self.microbatches
            else:
                parts = [tensor[_along(axis, start, self._end(start, stop))] for start, stop in bounds]
            for own, part in zip(found, parts, strict=True):
                own.append(part)
        return found

    def _end(self, start: Any, stop: Any) -> Any:
        return tf.maximum(stop, start + 1) if tf.is_tensor(stop) else stop

    def shares(self, tensors: Sequence[Any]) -> list[Any]:
        """The weight of each microbatch: a number; a scalar of the graph where the number of samples is not known."""
        if self.size is not None or not self.uneven or all(axis is None for axis in self.axes):
            return self.weights
        sizes = tf.cast(tf.stack([stop - start for start, stop in self._bounds(tensors)]), tf.float64)
        return tf.unstack(sizes / tf.reduce_sum(sizes), self.microbatches)

    def _bounds(self, tensors: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The first sample of each microbatch, and the one after its last."""
        count = self.microbatches
        if self.size is not None:
            return [self.bounds(microbatch) for microbatch in range(count)]
        cut = [(number, self.axes[number]) for number in self.tensors if self.axes[number] is not None]
        if not cut:
            return [(0, 0)] * count
        number, axis = cut[0]
        total = tf.shape(tensors[self.tensors.index(number)])[axis]
        name = self.paths[self.tensors.index(number)]
        fault = f"{name} has no samples, or a number that the {count} microbatches do not divide"
        fits = (total > 0) & (self.uneven | (total % count == 0))
        with tf.control_dependencies([tf.debugging.Assert(fits, [fault, total])]):
            bounds = tf.unstack(tf.range(count + 1) * total // count)
        return list(pairwise(bounds))

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in their places."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            leaves[number] = tensor
        for number, mask in self.masks.items():
            leaves[number] = private.with_mask(tf.identity(leaves[number]), leaves[mask])
        args, kwargs = tf.nest.pack_sequence_as(self.structure, leaves[: len(leaves) - len(self.masks)])
        return args, kwargs

    def key(self) -> tuple[Any, ...]:
        """The values that must be the same for a step that was traced to be used again."""
        own = set(self.tensors)
        others = tuple(_key(leaf) for number, leaf in enumerate(self.leaves) if number not in own)
        specs = tuple(
            (tuple(s.shape.as_list()) if s.shape.rank is not None else None, s.dtype) for s in self.specs()
        )
        return (
            specs,
            others,
            tuple(self.axes),
            self.microbatches,
            self.weights[0] if self.even else tuple(self.weights),
        )


class _Itself:
    """A thing that equals itself only. It is kept, so that no later one is taken for it."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


def _key(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return _Itself(leaf)
    return type(leaf), leaf


def prepare(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cut: Cut,
    microbatches: int,
    signature: Any = None,
) -> MiniBatch:
    """Check the arguments of a step and make them ready to be cut.

    ``signature``: types and shapes of the whole mini-batch, as ``tf.function`` takes them.

    Raises:
        UsageError: The arguments are not those of the signature; the first fault is named.
        SplitError: Tensors differ in size along the dim that they are cut, have no samples, or have a number of them
            that ``microbatches`` does not divide; the tensors are named.
    """
    found = _Arguments(cut)
    names = argument_names(function, args)
    for name, argument in [*zip(names, args, strict=True), *sorted(kwargs.items())]:
        for path, leaf in _flat(argument, name):
            found.add(name, path, leaf)
    found.add_masks()
    size, faults = _size(found.sizes, cut, microbatches)
    faults = [*found.faults, *find_unknown(function, cut), *faults]
    if faults:
        raise SplitError("\n".join(faults))
    given = None
    if signature is not None:
        own = [number for number in found.tensors if number not in found.masks.values()]
        given = _check_signature(signature, [found.leaves[number] for number in own], found.paths)
        given += [tf.TensorSpec([None] * found.leaves[at].shape.rank, tf.bool) for at in found.masks.values()]
        for spec, number in zip(given, found.tensors, strict=True):
            axis = found.axes[number]
            if axis is not None and (spec.shape.rank is None or spec.shape[axis] is None):
                size = None
    count = min(size or microbatches, microbatches)
    whole = tuple(args), dict(kwargs)
    return MiniBatch(
        found.leaves,
        whole,
        found.axes,
        found.tensors,
        count,
        size,
        found.paths,
        cut.uneven,
        given,
        found.masks,
    )


class _Arguments:
    """The tensors in the arguments of a step, as they are found; see :class:`MiniBatch`.

    Attributes:
        sizes: Of each tensor that is cut its path, how many samples it has, if that is known, and its shape.
        faults: What cannot be cut.
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self.leaves: list[Any] = []
        self.axes: list[int | None] = []
        self.tensors: list[int] = []
        self.paths: list[str] = []
        self.sizes: list[tuple[str, int | None, list[int | None]]] = []
        self.faults: list[str] = []
        self.masks: dict[int, int] = {}
        self._masked: list[tuple[int, str, str, Any]] = []

    def add(self, name: str, path: str, leaf: Any) -> None:
        """One more leaf, of the argument ``name``."""
        if isinstance(leaf, (np.ndarray, np.generic)):
            leaf = tf.convert_to_tensor(leaf)
        axis = None
        if isinstance(leaf, COMPOSITE):
            self.faults.append(
                f"{path} is a {type(leaf).__name__}, and a step takes plain tensors only: make it one outside of "
                "the step, with tf.convert_to_tensor, .to_tensor() or tf.sparse.to_dense"
            )
        elif isinstance(leaf, tf.Tensor):
            if (mask := private.mask_of(leaf)) is not None:
                self._masked.append((len(self.leaves), name, f"the mask of {path}", mask))
            self.tensors.append(len(self.leaves))
            self.paths.append(path)
            axis = None if name in self._cut.whole else self._cut.axes.get(name, 0)
            if axis is not None:
                self._add_cut(name, path, leaf.shape, axis)
        self.leaves.append(leaf)
        self.axes.append(axis)

    def add_masks(self) -> None:
        """The masks of the leaves, when all of these are known; they are cut as what they belong to."""
        for number, name, path, mask in self._masked:
            self.masks[number] = len(self.leaves)
            self.add(name, path, mask)

    def _add_cut(self, name: str, path: str, shape: tf.TensorShape, axis: int) -> None:
        """A tensor that is cut along a dim."""
        if shape.rank is None:
            self.sizes.append((path, None, [None]))
        elif -shape.rank <= axis < shape.rank:
            self.sizes.append((path, shape[axis], shape.as_list()))
        else:
            self.faults.append(
                f"{path} has the shape {shape.as_list()} and so no dim {axis} to cut: if every microbatch "
                f'needs it whole, write @weft.step(non_split_inputs=["{name}"])'
            )


def _size(
    sizes: Sequence[tuple[str, int | None, list[int | None]]], cut: Cut, microbatches: int
) -> tuple[int | None, list[str]]:
    """The number of samples, if any tensor shows that, and why they cannot be cut."""
    size = next((each for _, each, _ in sizes if each is not None), None)
    if faults := find_different(sizes):
        return size, faults
    if size == 0:
        return size, [f"{sizes[0][0]} has no samples: leave the step out for an empty batch"]
    if size is not None and size % microbatches and not cut.uneven:
        return size, [
            f"{sizes[0][0]} has {size} samples, which {microbatches} microbatches do not divide: choose a batch size "
            f"that is a multiple of {microbatches}; give tf.data's batch() drop_remainder=True, or cut the last batch "
            "as evenly as possible with @weft.step(allow_uneven=True)"
        ]
    return size, []


def _check_signature(signature: Any, tensors: list[Any], paths: list[str]) -> list[tf.TensorSpec]:
    """The signature's specs, one for each tensor."""
    specs = tf.nest.flatten(signature)
    if len(specs) != len(tensors):
        raise UsageError(
            f"input_signature has {len(specs)} specs, but the step was called with {len(tensors)} tensors"
        )
    for spec, tensor, path in zip(specs, tensors, paths, strict=True):
        if not spec.is_compatible_with(tensor):
            raise UsageError(
                f"{path} is {tensor.dtype.name}{tensor.shape.as_list()}, but input_signature says {spec}: call the "
                "step with what it says, or say less"
            )
    return list(specs)


def _flat(tree: Any, path: str) -> list[tuple[str, Any]]:
    """The leaves of an argument, in the order of ``tf.nest``, each with its path."""
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return [found for i, item in enumerate(tree) for found in _flat(item, f"{path}[{i}]")]
    if isinstance(tree, dict):
        return [found for key in sorted(tree) for found in _flat(tree[key], f"{path}[{key!r}]")]
    return [(path, leaf) for leaf in tf.nest.flatten(tree)]
