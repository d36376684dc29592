"""Names in a state: those that a wrapper has changed, and those that do not fit the model.

``DataParallel``, and weft itself, put ``module.`` before names; ``torch.compile`` puts ``_orig_mod.`` into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.untrusted import whole

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
    """Faults of a state whose names are not exactly the model's; first what all of them have too much, if it is alike.

    >>> name_faults(["a.bias"], ["b"])
    ['a.bias is missing', 'b is not part of the model']
    >>> print(name_faults(["a", "b"], ["net.a", "net.b"])[0])
    the names in the state begin with "net.": load {name.removeprefix("net."): value for name, value in state.items()}
    """
    lacking, more = sorted(missing, key=_by_number), sorted(unexpected, key=_by_number)
    return [
        *_added(lacking, more),
        *(f"{name} is missing" for name in lacking),
        *(f"{name} is not part of the model" for name in more),
    ]


def _added(wanted: Sequence[str], given: Sequence[str]) -> Iterator[str]:
    """The prefix and suffix by which the given names differ from the wanted ones, or the wanted from the given ones."""
    state, model = _around(wanted, given), _around(given, wanted)
    if state is not None:
        before, after = state
        added = [f'begin with "{before}"'] * bool(before) + [f'end in "{after}"'] * bool(after)
        name = f'name.removeprefix("{before}")' if before else "name"
        name += f'.removesuffix("{after}")' if after else ""
        yield f"the names in the state {' and '.join(added)}: load {{{name}: value for name, value in state.items()}}"
    elif model is not None and model[0] and not model[1]:
        yield (
            f'the names of the model begin with "{model[0]}", those in the state do not: load '
            f'{{"{model[0]}" + name: value for name, value in state.items()}}'
        )


def _around(inner: Sequence[str], outer: Sequence[str]) -> tuple[str, str] | None:
    """The texts before and after every one of ``inner`` that make ``outer`` of them; None if there are none."""
    names = set(outer)
    for name in outer if inner and len(inner) == len(names) else ():
        before, found, after = name.partition(inner[0])
        if found and names == {f"{before}{each}{after}" for each in inner}:
            return before, after
    return None


def _by_number(name: str) -> list[tuple[int, str]]:
    """The key by which ``layers.2`` comes before ``layers.10``."""
    numbered = ((whole(part), part) for part in name.split("."))
    return [(-1, part) if number is None else (number, "") for number, part in numbered]


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
