"""Optimizers' states between a restore and the first step: they wait in the save, so reading them is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft.errors import UsageError
from weft.tensorflow import private

_HELD = "_weft_waits_for_first_step"
_watched: set[tuple[type, str]] = set()
_depth = [0]


def hold(optimizer: Any, finalize: Callable[[list[Any]], None]) -> None:
    """From now on whoever reads the variables of an optimizer, or uses them, gets an error; see :func:`release`.

    ``finalize(variables)`` gives variables of a model their averages (``use_ema``), as ``fit`` does at its end.
    """
    _set(optimizer, finalize)
    for base, name in private.optimizer_reads():
        if (base, name) not in _watched:
            _watched.add((base, name))
            _watch(base, name)


def release(optimizer: Any) -> None:
    """Its variables have their values."""
    _set(optimizer, None)


@contextmanager
def reading() -> Iterator[None]:
    """Inside, variables can be read as they are: to give them values."""
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1


def _set(optimizer: Any, held: Any) -> None:
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            object.__setattr__(each, _HELD, held)


def _check(optimizer: Any) -> None:
    if not _depth[0] and getattr(optimizer, _HELD, None) is not None:
        raise UsageError(
            "the job was resumed, and what its optimizer keeps arrives with the first step, which gives it to "
            "partitions: read it, save it and apply gradients after that"
        )


def _watch(base: type, name: str) -> None:
    original: Any = vars(base)[name]
    read: Any = original.fget if isinstance(original, property) else original

    if name == "finalize_variable_values":

        @functools.wraps(read)
        def finalize(self: Any, variables: Any) -> Any:
            return (getattr(self, _HELD, None) or functools.partial(read, self))(variables)

        setattr(base, name, finalize)
        return

    @functools.wraps(read)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return read(self, *args, **kwargs)

    setattr(base, name, property(checked, original.fset) if isinstance(original, property) else checked)
