"""Names in a state: those that a wrapper has changed, and those that do not fit the model.

``DataParallel``, and weft itself, put ``module.`` before names; ``torch.compile`` puts ``_orig_mod.`` into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

WRAPPER, COMPILED = "module.", "_orig_mod."


def fitting(given: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """For each of the ``given`` names the one of the ``wanted`` that it means, or itself.

    A given name that is wanted as it is means that one, so a model may have a child called ``module``. For the others
    the wrappers' parts of names do not count, on either side.

    >>> fitting(["module.a.weight", "b", "c"], ["a._orig_mod.weight", "b", "d"])
    {'module.a.weight': 'a._orig_mod.weight', 'b': 'b', 'c': 'c'}
    """
    names = list(given)
    exact = {name for name in names if name in wanted}
    bare = {_bare(name): name for name in wanted if name not in exact}
    found: dict[str, str] = {}
    for name in names:
        found[name] = name if name in exact else bare.pop(_bare(name), name)
    return found


def name_faults(missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
    """Faults of a state whose names are not exactly the model's.

    >>> name_faults(["a.bias"], ["b"])
    ['a.bias is missing', 'b is not part of the model']
    """
    return [
        *(f"{name} is missing" for name in missing),
        *(f"{name} is not part of the model" for name in unexpected),
    ]


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a state, by their names; of a parameter that is cut that of the whole."""
    return {name: whole_shape(value) for name, value in state.items() if isinstance(value, Tensor)}


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, or of the whole of which this rank has a part."""
    cut = tensor._weft_cut  # type: ignore[attr-defined]
    return tuple(tensor.shape) if cut is None else tuple(cut[0][0].shape)


def shape_faults(given: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> list[str]:
    """Faults of a state whose tensors have other shapes than the model's of the same names.

    >>> shape_faults({"a": (2, 3), "b": ()}, {"a": (3, 2), "c": ()})
    ['a has the shape [2, 3], the model needs [3, 2]']
    """
    return [
        f"{name} has the shape {list(given[name])}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in given and list(given[name]) != list(shape)
    ]


def _bare(name: str) -> str:
    name = name.replace(COMPILED, "")
    while name.startswith(WRAPPER):
        name = name.removeprefix(WRAPPER)
    return name
