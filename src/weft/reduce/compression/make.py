"""A compression by its name, as settings and command lines give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from weft.errors import ConfigError
from weft.reduce.compression.compressors import cast, int8, powersgd, topk
from weft.reduce.compression.pair import Compression, between_hosts, chain


class _Option(NamedTuple):
    parse: Callable[[str], object]
    legal: Callable[[object], bool]
    text: str


class _Kind(NamedTuple):
    build: Callable[..., Compression]
    options: dict[str, _Option]
    ends: bool


def _whole(least: int) -> _Option:
    return _Option(
        int, lambda value: isinstance(value, int) and value >= least, f"a whole number of at least {least}"
    )


_FLAG = _Option({"true": True, "false": False}.__getitem__, lambda value: True, "true or false")
_ROUNDING = _Option(str, lambda value: value in ("nearest", "stochastic"), "nearest or stochastic")
_RATIO = _Option(float, lambda value: isinstance(value, float) and 0 < value <= 1, "above 0 and at most 1")
_KINDS = {
    "fp16": _Kind(lambda: cast(torch.float16), {}, False),
    "bf16": _Kind(lambda: cast(torch.bfloat16), {}, False),
    "int8": _Kind(int8, {"block": _whole(1), "rounding": _ROUNDING, "feedback": _FLAG}, True),
    "topk": _Kind(topk, {"ratio": _RATIO}, True),
    "powersgd": _Kind(powersgd, {"rank": _whole(1), "start": _whole(2)}, True),
}
NAMES = tuple(_KINDS)


def make(spec: str) -> Compression:
    """The compression of a text: ``"int8"``, ``"int8:block=128,rounding=stochastic"``, or a chain ``"fp16+topk"``.

    Over a ``Hierarchical`` collective only what goes between hosts is compressed.

    Args:
        spec: Names and options. ``fp16``, ``bf16``; ``int8`` (``block``, ``rounding``, ``feedback``); ``topk``
            (``ratio``); ``powersgd`` (``rank``, ``start``). In a chain all but the last are ``fp16`` or ``bf16``.

    Raises:
        ConfigError: A name or an option is unknown, a value is not legal, or a chain goes on after its end. All
            faults are named at once.
    """
    faults: list[str] = []
    parts = spec.split("+")
    pairs = []
    for index, part in enumerate(parts):
        name, _, text = part.strip().partition(":")
        kind = _KINDS.get(name)
        if kind is None:
            faults.append(f"there is no compression {name!r}: choose one of {', '.join(NAMES)}")
            continue
        if kind.ends and index + 1 < len(parts):
            faults.append(f"{name} sends messages of its own, so nothing can follow it: put it last")
        values = _values(name, kind, text, faults)
        if not faults:
            pairs.append(kind.build(**values))
    if faults:
        raise ConfigError(f"the compression {spec!r} cannot be made: {'; '.join(faults)}")
    whole = pairs.pop()
    while pairs:
        whole = chain(pairs.pop(), whole)
    return between_hosts(whole)


def _values(name: str, kind: _Kind, text: str, faults: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, _, given = item.partition("=")
        option = kind.options.get(key)
        if option is None:
            known = ", ".join(kind.options) or "none"
            faults.append(f"{name} has no option {key!r}: it has {known}")
            continue
        try:
            values[key] = option.parse(given)
            legal = option.legal(values[key])
        except (ValueError, KeyError):
            legal = False
        if not legal:
            faults.append(f"{name}'s option {key} is {given!r}, and has to be {option.text}")
    return values
