"""Where the user wants modules to be: ``with weft.partition(i):`` and ``weft.set_partition``.

A wish is kept in the module (``MARK``), so that it survives copying. The innermost one counts: a module without
one of its own goes where its parent goes, and the root to ``default_partition``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from weft.errors import PlacementError, UsageError
from weft.torch.split.unit_tree import Piece, Tree
from weft.torch.tensor_parallel.splits import COLUMN, ROW, VOCABULARY, is_linear
from weft.torch.tensors.marks import MARK, WHOLE

_contexts = threading.local()


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Modules that are created inside go to partition ``index``; of nested contexts the innermost counts.

    Ignored while ``auto_partition`` is true.
    """
    _check(index)
    with _marking(MARK, index):
        yield


@contextmanager
def tensor_parallelism(enabled: bool = True) -> Iterator[None]:
    """Decide whether weights of modules that are created inside may be sharded; by default they may.

    ``enabled``: False keeps them whole on every rank. Of nested contexts the innermost counts.
    :func:`set_tensor_parallelism` wins over it.

    Raises:
        UsageError: ``enabled`` is neither True nor False.
    """
    _check_enabled(enabled)
    with _marking(WHOLE, not enabled):
        yield


@contextmanager
def _marking(key: str, value: Any) -> Iterator[None]:
    """Inside, modules that are created are marked with this; of marks with one key the innermost counts."""
    stack: list[tuple[str, Any]] = _contexts.__dict__.setdefault("stack", [])
    stack.append((key, value))
    if len(stack) == 1:
        _contexts.original = original = nn.Module.__init__

        @functools.wraps(original)
        def marked(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            for name, wish in stack:
                module.__dict__[name] = (wish, False)

        nn.Module.__init__ = marked  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            nn.Module.__init__ = _contexts.original  # type: ignore[method-assign]


def set_tensor_parallelism(module: nn.Module, enabled: bool | str = True) -> None:
    """Decide before the first step whether the weights in ``module`` may be sharded, or how; by default they may.

    What can be cut is found by itself (``tensor_parallel_degree``). ``enabled``: False keeps ``module``, and all in it,
    whole on every rank. One linear may be given a way: ``"column"``, each rank computes some of its results, which are
    all-gathered unless the next linear takes them sharded; ``"row"``, each rank takes some of its inputs, and the
    results are all-reduced. ``"vocabulary"``: an embedding, or the linear that scores its words, by rows. Where this
    cannot be, the first step raises :class:`UsageError` before anything is cut.

    Wins over :func:`tensor_parallelism`; modules inside that were set on their own stay as they were set.

    Raises:
        UsageError: It is no module, ``enabled`` is none of these, or the module is nothing that can be cut so.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"set_tensor_parallelism takes a module, not a {type(module).__qualname__}")
    if enabled in (COLUMN, ROW, VOCABULARY):
        _check_kind(module, str(enabled))
    else:
        _check_enabled(enabled, ', "column", "row" or "vocabulary"')
    _forget_contexts(module, WHOLE)
    module.__dict__[WHOLE] = (enabled if isinstance(enabled, str) else not enabled, True)


def _check_kind(module: nn.Module, how: str) -> None:
    """Raise :class:`UsageError` for a module of another kind than those that can be cut in this way."""
    words = type(module) is nn.Linear or isinstance(module, nn.Embedding)
    if not (words if how == VOCABULARY else is_linear(module)):
        kinds = "a torch.nn.Linear or an embedding" if how == VOCABULARY else "a torch.nn.Linear"
        raise UsageError(
            f'set_tensor_parallelism(module, "{how}") takes {kinds}, not a {type(module).__qualname__}: say it of each '
            "such module in it"
        )


def _check_enabled(enabled: object, others: str = "") -> None:
    if not isinstance(enabled, bool):
        raise UsageError(f"enabled is {enabled!r}, it must be True{',' if others else ' or'} False{others}")


def _forget_contexts(module: nn.Module, key: str) -> None:
    """Take the marks of contexts from a module and all in it."""
    for child in module.modules():
        mark = child.__dict__.get(key)
        if mark is not None and not mark[1]:
            del child.__dict__[key]


def set_partition(module: nn.Module, index: int) -> None:
    """Put ``module``, and what it contains, on partition ``index``, before the first step.

    Wins over :func:`partition`; modules inside that have been set on their own stay where they were put.
    """
    _check(index)
    _forget_contexts(module, MARK)
    module.__dict__[MARK] = (index, True)


def _check(index: int) -> None:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise PlacementError(f"a partition is a whole number from 0, not {index!r}")


def wishes(root: nn.Module, default: int, partitions: int) -> dict[str, int]:
    """The partition that each module of ``root`` is to go to, by name."""
    found: dict[str, int] = {}
    faults = []

    def walk(module: nn.Module, name: str, inherited: int) -> None:
        mark = module.__dict__.get(MARK)
        index = inherited if mark is None else mark[0]
        if name not in found:
            found[name] = index
            if mark is not None and index >= partitions:
                faults.append(f"{name or 'the model'} was put on partition {index}")
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, index)

    walk(root, "", default)
    if faults:
        raise PlacementError(
            f"{'; '.join(faults)}, but there are {partitions} partitions (0 to {partitions - 1}): raise the setting "
            '"partitions" or choose another index'
        )
    return found


def place_by_hand(
    tree: Tree, root: nn.Module, default: int, partitions: int
) -> tuple[set[str], list[Piece], list[int]]:
    """The opened modules, the units and their partitions, as the user wishes. A unit is as large as a wish reaches."""
    wished = wishes(root, default, partitions)
    modules = {id(module): name for name, module in root.named_modules()}

    def inside(name: str) -> set[int]:
        module = tree.records[name].module
        return {
            wished[modules[id(child)]]
            for child in module.modules()
            if next(child.parameters(recurse=False), None) is not None
            or next(child.buffers(recurse=False), None) is not None
        }

    opened = {
        name
        for name in tree.records
        if len(inside(name)) > 1 or (tree.must_open(name) and tree.openable(name))
    }
    refused = [name or "the model" for name in sorted(opened) if not tree.openable(name)]
    if refused:
        raise PlacementError(
            f"{', '.join(refused)} cannot be split over partitions: it is compiled, calls its modules in a "
            "torch.autograd.Function, has nested tensors (torch.nested) in its own code, or passes objects between its "
            "modules that cannot be sent. Put it on one partition as a whole"
        )
    pieces = [piece for piece in tree.pieces(opened) if not piece.floating]
    places = [min(inside(piece.name) or {wished[piece.name]}) for piece in pieces]
    _check_tied(pieces, places, tree)
    _check_function_calls(pieces, places, tree)
    return opened, pieces, places


def _check_function_calls(pieces: list[Piece], places: list[int], tree: Tree) -> None:
    """Refuses modules on different partitions that one autograd function calls, since it runs on one."""
    for function, names in tree.trace.function_calls:
        at = {
            place
            for piece, place in zip(pieces, places, strict=True)
            if any(part.name in names for part in tree.subtree(piece.name))
        }
        if len(at) > 1:
            raise PlacementError(
                f"the torch.autograd.Function {function} calls modules of the partitions "
                f"{', '.join(map(str, sorted(at)))}: {', '.join(sorted(names))}. Put them on the same partition"
            )


def _check_tied(pieces: list[Piece], places: list[int], tree: Tree) -> None:
    holders: dict[int, tuple[str, int]] = {}
    faults = []
    for piece, at in zip(pieces, places, strict=True):
        for number in piece.module_parameters():
            name, other = holders.setdefault(number, (piece.name, at))
            if other != at:
                faults.append(
                    f"{name} (partition {other}) and {piece.name} (partition {at}) share the parameter "
                    f"{tree.parameter_names[number]}"
                )
    if faults:
        raise PlacementError("; ".join(faults) + ": put modules that share a parameter on the same partition")
